// What the CUDA version of bias and GELU offers: plain C, nothing of torch. Addresses are of device memory, work is on
// `stream`, and what is returned is a cudaError_t.
#pragma once

#include "bias_gelu.h"

extern "C" int32_t zoo_bias_gelu_cuda(const zoo::BiasGelu* c, void* stream);

// `parts`: D floats for each 64 rows begun. D is at most 16,776,960.
extern "C" int32_t zoo_bias_gelu_backward_cuda(const zoo::BiasGelu* c, float* parts, void* stream);
