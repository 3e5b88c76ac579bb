// What the CUDA version of 1-bit compression offers: plain C, nothing of torch. Returns are of cudaError_t.
#pragma once

#include "onebit.h"

extern "C" int32_t zoo_onebit_compress_cuda(const void* x, int32_t dtype, float* error, uint8_t* bits, float* scales,
                                            int64_t n, int64_t group, void* stream);
extern "C" int32_t zoo_onebit_decompress_cuda(void* out, int32_t dtype, const uint8_t* bits, const float* scales,
                                              int32_t add, int64_t n, int64_t group, void* stream);
