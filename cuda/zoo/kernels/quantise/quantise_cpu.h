// What the CPU version of quantisation offers to the binding.
#pragma once

#include "../common/isa.h"
#include "quantise.h"

namespace zoo {

// n elements of x from `offset` on become one group at q; returns its scale.
ZOO_DECLARE(float quantise_group(const void* x, Dtype dtype, int bits, int8_t* q, int64_t offset, int64_t n))
// Elements [offset, offset + n), all of one group, summed over `ranks` quantised tensors of `stride` bytes each.
ZOO_DECLARE(void dequantise_group(void* out, Dtype dtype, int bits, const int8_t* q, int64_t stride, const float* scales,
                                  int64_t scale_stride, int64_t ranks, float factor, int64_t offset, int64_t n))

void quantise_cpu(const void* x, Dtype dtype, int bits, int8_t* q, float* scales, int64_t n, int64_t group,
                  Swizzle swizzle);
void dequantise_cpu(void* out, Dtype dtype, int bits, const int8_t* q, const float* scales, int64_t ranks, float factor,
                    int64_t n, int64_t group);

}  // namespace zoo
