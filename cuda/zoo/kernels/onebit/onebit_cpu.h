// What the CPU version of 1-bit compression offers to the binding.
#pragma once

#include "../common/isa.h"
#include "onebit.h"

namespace zoo {

// One group: n elements from `offset` on.
ZOO_DECLARE(float onebit_compress_group(const void* x, Dtype dtype, float* error, uint8_t* bits, int64_t offset, int64_t n))
ZOO_DECLARE(void onebit_decompress_group(void* out, Dtype dtype, const uint8_t* bits, float scale, bool add,
                                         int64_t offset, int64_t n))

void onebit_compress_cpu(const void* x, Dtype dtype, float* error, uint8_t* bits, float* scales, int64_t n,
                         int64_t group);
void onebit_decompress_cpu(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                           int64_t group);

}  // namespace zoo
