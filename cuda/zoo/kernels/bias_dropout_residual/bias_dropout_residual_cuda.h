// What the CUDA version of bias, dropout and residual offers: plain C, nothing of torch. Addresses are of device memory,
// work is on `stream`, and what is returned is a cudaError_t.
#pragma once

#include "bias_dropout_residual.h"

extern "C" int32_t zoo_bias_dropout_residual_cuda(const zoo::BiasDropout* c, void* stream);

// `parts`: D floats for each 64 rows begun. D is at most 16,776,960.
extern "C" int32_t zoo_bias_dropout_residual_backward_cuda(const zoo::BiasDropout* c, float* parts, void* stream);
