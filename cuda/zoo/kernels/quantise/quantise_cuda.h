// What the CUDA version of quantisation offers: plain C, nothing of torch. Addresses are of device memory, work is on
// `stream`, and what is returned is a cudaError_t.
#pragma once

#include "quantise.h"

// q begins at a multiple of 4 bytes.
extern "C" int32_t zoo_quantise_cuda(const void* x, int32_t dtype, int32_t bits, int8_t* q, float* scales, int64_t n,
                                     int64_t group, const zoo::Swizzle* swizzle, void* stream);
extern "C" int32_t zoo_dequantise_cuda(void* out, int32_t dtype, int32_t bits, const int8_t* q, const float* scales,
                                       int64_t ranks, float factor, int64_t n, int64_t group, void* stream);
