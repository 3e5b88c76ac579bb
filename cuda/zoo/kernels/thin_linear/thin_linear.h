// A linear layer whose sums do not depend on who else is in the batch: y = x·Wᵀ + b, made for few tokens.
//
//   y_{m,n} = Σ_k x_{m,k} w_{n,k} + b_n
//
// Arithmetic. x and w are widened to fp32, exactly. Product k goes into lane k mod 16 by a fused multiply-add, in the
// order of k; then the lanes are folded by halves, lane i += lane i + 8, 4, 2, 1; b_n is added, and y is rounded once.
// So the bits of y_{m,n} are a function of x_m, w_n and b_n: neither M, N, the other rows, the threads nor the
// instruction set change them, and a token that is generated alone has the bits of the same token in a prompt. With
// u = 2^-24:
//   |error of y| <= (ceil(K / 16) + 6)·u·(Σ_k |x_k w_k| + |b|), and one rounding of y (Higham 2002, section 4.2).
//
// Several W that multiply one x have their y side by side.
//
// Memory contract. x (M, K), each W (N, K) and y (M, ΣN) contiguous, of one format (fp32, bf16, fp16); b (N,) of any.
// On CPUs W is read from memory once, as far as 48 of its rows fit into the cache. Scratch where x is of 16 bits: M·K
// numbers of fp32, and for more than 8 tokens (AVX2: 6) 48·K in each thread.
//
// Gradients: dx = dy·W, dW = dyᵀ·x, db = Σ_m dy_m, by torch's products.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   thin_linear_kernel 256 threads, <= 64 registers, >= 32 warps
// Four threads have the lanes of a row there, four each: the same bits. A block reads W once for 4 tokens.
#pragma once

#include "../common/isa.h"

namespace zoo {

struct ThinLinear {
  const void *x, *w, *bias;               // bias: null without one
  void* y;                                // of these rows: y begins within a row of all of them
  int64_t tokens, rows, columns, stride;  // M, N, K, ΣN
  Dtype dtype, bias_dtype;
};

ZOO_KERNEL(thin_linear, const ThinLinear& c)

}  // namespace zoo
