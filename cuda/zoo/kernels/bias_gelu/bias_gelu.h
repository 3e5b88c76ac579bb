// GELU of x + bias (Hendrycks and Gimpel 2016): y = z·Φ(z), z = x + b.
//
//   erf form    Φ(z) = 1 - Q(z) for z >= 0, Q(-z) below (no cancellation);   y' = Φ(z) + z·e^(-z²/2)/√(2π)
//   tanh form   Φ(z) ≈ (1 + tanh(u/2))/2 = σ(u), u = z·(A + B·z²), A = 2√(2/π), B = 0.044715·A
//               y' = σ + z·(σ·(1 - σ))·(A + 3·B·z²)
//
// Backward: dx = dy·y'(x + b), db = Σ_t dx before it is rounded. All arithmetic is fp32, every operation rounded by
// itself as written; exp and Q are those of common/elementary.h; the sum is a column sum (common/lanes.h).
//
// Memory contract. x, y and their gradients: (T, D), contiguous, of one format. b and its gradient: (D,), any format.
// Forward reads x and writes y; backward reads dy and x and writes dx, and keeps D floats for each 64 rows.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   bias_gelu_kernel 256 threads, <= 80 registers, >= 24 warps
// Bytes an element of 16 bits: forward 4, backward 6, and 1/8 for the sums of db. In the tanh form about 50 operations
// an element, counted in the source.
#pragma once

#include "../common/elementary.h"
#include "../common/isa.h"

namespace zoo {

enum GeluForm : int32_t { GELU_ERF = 0, GELU_TANH = 1 };

struct BiasGelu {
  const void *grad_y, *x, *bias;  // grad_y: backward only
  void *out, *grad_bias;          // y, or dx; grad_bias: backward only
  int64_t rows, dim;
  Dtype dtype, bias_dtype;
  GeluForm form;
};

// On CUDA D is at most 16,776,960.
ZOO_KERNEL(bias_gelu, const BiasGelu& c)
// `parts`: D floats for each 64 rows begun.
ZOO_KERNEL(bias_gelu_backward, const BiasGelu& c, float* parts)

inline namespace ZOO_ISA {

// T: float, or a vector of it.
template <int FORM, class T>
ZOO_HD T gelu_of(T z) {
  if constexpr (FORM == GELU_TANH) {
    return z * sigmoid_of(z * (1.5957691f + 0.07135481f * (z * z)));
  } else {
    T density;
    const T tail = normal_tail(z < 0.0f ? -z : z, density);
    return z * (z < 0.0f ? tail : 1.0f - tail);
  }
}

template <int FORM, class T>
ZOO_HD T gelu_grad(T z) {
  if constexpr (FORM == GELU_TANH) {
    const T square = z * z;
    const T s = sigmoid_of(z * (1.5957691f + 0.07135481f * square));
    return s + z * ((s * (1.0f - s)) * (1.5957691f + 0.21406444f * square));
  } else {
    T density;
    const T tail = normal_tail(z < 0.0f ? -z : z, density);
    return (z < 0.0f ? tail : 1.0f - tail) + z * (density * 0.39894228f);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
