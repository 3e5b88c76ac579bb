// Dropout of x + bias, added to the residual (Srivastava et al. 2014, in the inverted form).
//
//   out = r + k·(x + b)        k = 1/(1 - p) where word(i) >= p·2^32, else 0
//   dx = k·dy     db = Σ_t dx before it is rounded     dr = dy
//   dropout alone   y = k·x     dx = k·dy
//
// word(i) is the random word of element i of x, counted over all of it (common/philox.h), so the mask is the same on
// every device and is computed again in the backward instead of being kept. Dropout alone counts from `first` on: x may
// be a part of a tensor, whose mask it gets. p·2^32 is rounded up to an integer: an element is dropped with probability
// p to 2^-32. With p = 0, as in evaluation, no word is made and out = r + (x + b); where p·2^32 rounds up to 2^32, as
// for p = 1, everything is dropped. k is rounded to fp32 once. A dropped element contributes +0, whatever it was: a NaN
// or infinity that is dropped is gone. All other arithmetic is fp32 in the order written; the sum is a column sum.
//
// Memory contract. x, r, out and their gradients: (T, D), contiguous, of one format. b and db: (D,), any format.
// Forward reads x and r and writes out; backward reads dy and writes dx, and keeps D floats for each 64 rows; dropout
// alone reads x and writes y.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   bias_dropout_kernel 256 threads, <= 77 registers, >= 24 warps
// Bytes an element of 16 bits: forward 6, backward 4, and 1/8 for the sums of db. The words take 80 operations for four
// elements, counted in the source.
#pragma once

#include "../common/isa.h"
#include "../common/philox.h"

namespace zoo {

struct BiasDropout {
  const void *x, *bias, *residual;  // x: dy in the backward, which has no bias and no residual
  void *out, *grad_bias;            // out: dx in the backward; grad_bias: only there
  int64_t rows, dim, first;         // first: the place of x's first element in what the mask is of
  Dtype dtype, bias_dtype;
  Philox generator;
  uint32_t threshold;  // keep where word >= threshold; 0: no words are needed
  float scale;         // 1/(1 - p), or 0 where everything is dropped: 2^32 is no threshold
};

// On CUDA D is at most 16,776,960.
ZOO_KERNEL(bias_dropout_residual, const BiasDropout& c)
// `parts`: D floats for each 64 rows begun.
ZOO_KERNEL(bias_dropout_residual_backward, const BiasDropout& c, float* parts)
ZOO_KERNEL(dropout, const BiasDropout& c)

inline namespace ZOO_ISA {

ZOO_HD float dropped(float value, uint32_t word, uint32_t threshold, float scale) {
  return ((word >= threshold) & (scale != 0.0f)) ? scale * value : 0.0f;
}

}  // namespace ZOO_ISA
}  // namespace zoo
