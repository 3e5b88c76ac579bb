// Layer normalisation (Ba, Kiros and Hinton 2016, equation 4), with the residual added in where there is one.
//
//   s = x, or round(x + r)                     of a row (D,); rounded to the format of x, and returned
//   μ = (1/D)·Σ s       v = (1/D)·Σ (s - μ)²   ρ = 1/√(v + ε)
//   y = ((s - μ)·ρ)·w + b
//
// Backward, from dy and, where s was returned, ds:
//
//   x̂ = (s - μ)·ρ     g = dy·w     α = (1/D)·Σ g     β = (1/D)·Σ g·x̂
//   dx = ((g - α) - x̂·β)·ρ [+ ds]          dr = dx
//   dw = Σ_t dy·x̂     db = Σ_t dy          over all rows t
//
// All arithmetic is fp32, every operation rounded by itself as written; 1/D and ε are rounded to fp32 once. Sums along
// a row are lane sums, sums over rows column sums (common/lanes.h), so every instruction set, any number of threads,
// CUDA (compiled without contraction) and reference.py give the same bits. v needs two passes over s, which stays in
// the cache, and cannot become negative.
//
// Memory contract. x, r, s, y and their gradients: (T, D), contiguous, of one format. w and b and their gradients:
// (D,), of one format. μ and ρ: (T,), fp32. D >= 1. Forward reads x (and r) once and writes y (and s) once; backward
// reads dy and s (and ds) once and writes dx once, and keeps two rows of floats for each 64.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   forward_kernel 256 threads, <= 54 registers, >= 32 warps
//   backward_kernel 256 threads, <= 58 registers, >= 32 warps
//   parts_kernel 256 threads, <= 64 registers, >= 32 warps
// Rows of up to 1,024 columns have 64 threads. A row is in shared memory, 4 bytes a column (backward: 8), up to 44 KiB;
// longer ones come in pieces, and again for each sweep. With 4,096 columns that leaves room for 9 blocks on sm_80 and
// for 4 in the backward (sm_90 and sm_100: 13 and 6): all warps that registers allow. Bytes an element of 16 bits:
// forward 4, with a residual 8; backward 6 and again 4 for the sums of dw and db, and 1/4 for those of the parts.
#pragma once

#include "../common/isa.h"

namespace zoo {

struct LayerNorm {
  const void *x, *residual;  // residual and sum: null where there is none
  const void *weight, *bias;
  void *y, *sum;
  float *mean, *rstd;
  int64_t rows, dim;
  float inverse_dim, eps;
  Dtype dtype, weight_dtype;
};

struct LayerNormBackward {
  const void *grad_y, *grad_sum;  // grad_sum: null where there is none
  const void *sum, *weight;
  const float *mean, *rstd;
  void *grad_x, *grad_weight, *grad_bias;
  int64_t rows, dim;
  float inverse_dim;
  Dtype dtype, weight_dtype;
};

// On CUDA T is at most 2^31 - 1.
ZOO_KERNEL(layer_norm, const LayerNorm& c)
// `parts`: parts_width(D) floats for each 64 rows begun. On CUDA D is at most 16,776,960.
ZOO_KERNEL(layer_norm_backward, const LayerNormBackward& c, float* parts)

inline namespace ZOO_ISA {

// The floats from one row of scratch to the next, so that each begins at a multiple of 64 bytes.
ZOO_HD int64_t padded(int64_t n) { return ceil_div(n, 16) * 16; }

// Of a part of the column sums: dw, and from padded(D) on db.
ZOO_HD int64_t parts_width(int64_t n) { return 2 * padded(n); }

// T: float, or a vector of it.
template <class T>
ZOO_HD T normalised(T s, T mean, T rstd) {
  return (s - mean) * rstd;
}

template <class T>
ZOO_HD T layer_norm_of(T s, T mean, T rstd, T weight, T bias) {
  return normalised(s, mean, rstd) * weight + bias;
}

template <class T>
ZOO_HD T layer_norm_grad(T g, T normalised, T alpha, T beta, T rstd) {
  return ((g - alpha) - normalised * beta) * rstd;
}

}  // namespace ZOO_ISA
}  // namespace zoo
