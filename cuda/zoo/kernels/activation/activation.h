// The activation of a perceptron, into memory that is there: a = φ(p); gated, a = φ(g)·u with (g, u) = p (Shazeer 2020,
// "GLU variants improve transformer").
//
//   SiLU        φ(z) = z·σ(z)            φ' = σ + z·(σ·(1 - σ))
//   GELU        both forms of bias_gelu.h, without the bias
//   ReLU        φ(z) = z, 0 below 0      φ' = 1, 0 up to 0; a NaN is kept by φ, and has the slope 1
//
// Backward, of da: dp = da·φ'(p); gated, dg = (da·u)·φ'(g), du = da·φ(g). It writes a once more: whoever keeps p alone
// needs both. All arithmetic is fp32, every operation rounded by itself as written.
//
// Memory contract. p and dp: (T, H), gated (T, 2H) with g in the first H numbers of a row; a and da: (T, H); all
// contiguous and of one format. Forward reads p and writes a; backward reads da and p and writes a and dp. Nothing else
// is kept.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   activation_kernel 256 threads, <= 64 registers, >= 32 warps
// Bytes an element of a of 16 bits: forward 4, gated 6; backward 8, gated 12.
#pragma once

#include "../bias_gelu/bias_gelu.h"

namespace zoo {

enum Form : int32_t { SILU = 0, GELU = 1, GELU_BY_TANH = 2, RELU = 3 };

struct Activation {
  const void *grad_a, *pre;  // grad_a: backward only
  void *a, *grad_pre;        // grad_pre: backward only
  int64_t rows, dim;         // T, H
  Dtype dtype;
  Form form;
  bool gated;
};

// On CUDA H is at most 16,776,960.
ZOO_KERNEL(activate, const Activation& c)
ZOO_KERNEL(activate_backward, const Activation& c)

inline namespace ZOO_ISA {

// φ(z), and φ'(z) if it is asked for. T: float, or a vector of it.
template <int FORM, bool SLOPE, class T>
ZOO_HD T activation_of(T z, T& slope) {
  if constexpr (FORM == SILU) {
    const T s = sigmoid_of(z);
    if constexpr (SLOPE) slope = s + z * (s * (1.0f - s));
    return z * s;
  } else if constexpr (FORM == RELU) {
    if constexpr (SLOPE) slope = z <= 0.0f ? T{} : T{} + 1.0f;
    return z < 0.0f ? T{} : z;
  } else {
    constexpr int GELU_FORM = FORM == GELU ? GELU_ERF : GELU_TANH;
    if constexpr (SLOPE) slope = gelu_grad<GELU_FORM>(z);
    return gelu_of<GELU_FORM>(z);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
