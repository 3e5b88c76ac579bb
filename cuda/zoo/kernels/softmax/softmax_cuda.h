// What the CUDA version of softmax offers: plain C, nothing of torch. Addresses are of device memory, work is on `stream`,
// and what is returned is a cudaError_t.
#pragma once

#include "softmax.h"

extern "C" int32_t zoo_softmax_cuda(const zoo::Softmax* c, void* stream);
extern "C" int32_t zoo_softmax_backward_cuda(const zoo::SoftmaxBackward* c, void* stream);
