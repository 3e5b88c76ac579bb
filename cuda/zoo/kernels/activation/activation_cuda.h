// What the CUDA version of activations offers: plain C, nothing of torch. Addresses are of device memory, work is on
// `stream`, and what is returned is a cudaError_t.
#pragma once

#include "activation.h"

extern "C" int32_t zoo_activation_cuda(const zoo::Activation* c, void* stream);

extern "C" int32_t zoo_activation_backward_cuda(const zoo::Activation* c, void* stream);
