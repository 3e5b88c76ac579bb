// Root mean square normalisation (Zhang and Sennrich 2019, equation 4), with the residual added in where there is one.
//
//   s = x, or round(x + r)                     of a row (D,); rounded to the format of x, and returned
//   ρ = 1/√((1/D)·Σ s² + ε)
//   y = (s·ρ)·w, or (s·ρ)·(1 + w)
//
// All arithmetic is fp32, every operation rounded by itself as written, y rounded once; 1/D and ε are rounded to fp32
// once. The sum is a lane sum (common/lanes.h), so every instruction set, any number of threads, CUDA and reference.py
// give the same bits, and a row of y depends on its row of x (and r) and on w alone.
//
// Gradients: with x̂ = s·ρ and g = dy·w, ds = ρ·(g - x̂·(1/D)·Σ g·x̂), dw = Σ_t dy·x̂, by torch.
//
// Memory contract. x, r, s and y: (T, D), contiguous, of one format. w: (D,). D >= 1. Reads x (and r) once and writes y
// (and s) once.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   rms_norm_kernel 256 threads, <= 54 registers, >= 32 warps
#pragma once

#include "../common/isa.h"

namespace zoo {

struct RmsNorm {
  const void *x, *residual;  // residual and sum: null where there is none
  const void* weight;
  void *y, *sum;
  int64_t rows, dim;
  Dtype dtype, weight_dtype;
  float inverse_dim, eps;
  bool plus_one;
};

ZOO_KERNEL(rms_norm, const RmsNorm& c)

}  // namespace zoo
