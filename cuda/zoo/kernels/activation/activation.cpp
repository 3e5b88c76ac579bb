// Activations on the CPU. Compiled once for each instruction set.
#include <type_traits>

#include "../common/blocks.h"
#include "../common/parallel.h"
#include "activation.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <int FORM, bool GATED>
void forward(float* __restrict a, const float* __restrict z, const float* __restrict u, int64_t n) {
  float none;
  for (int64_t i = 0; i < n; ++i) {
    const float y = activation_of<FORM, false>(z[i], none);
    a[i] = GATED ? y * u[i] : y;
  }
}

template <int FORM, bool GATED>
void backward(float* __restrict a, float* __restrict dz, float* __restrict du, const float* __restrict da,
              const float* __restrict z, const float* __restrict u, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float slope;
    const float y = activation_of<FORM, true>(z[i], slope);
    if constexpr (GATED) {
      a[i] = y * u[i];
      dz[i] = (da[i] * u[i]) * slope;
      du[i] = da[i] * y;
    } else {
      a[i] = y;
      dz[i] = da[i] * slope;
    }
  }
}

// fn(FORM) as a constant.
template <class Fn>
void with_form(Form form, const Fn& fn) {
  if (form == SILU) fn(std::integral_constant<int, SILU>());
  else if (form == GELU) fn(std::integral_constant<int, GELU>());
  else if (form == GELU_BY_TANH) fn(std::integral_constant<int, GELU_BY_TANH>());
  else fn(std::integral_constant<int, RELU>());
}

template <int FORM, bool GATED>
void all_forward(const Activation& c, int64_t begin, int64_t end) {
  float z_[BLOCK], u_[BLOCK], a_[BLOCK];
  const int64_t wide = GATED ? 2 * c.dim : c.dim;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < c.dim; i += BLOCK) {
      const int64_t n = c.dim - i < BLOCK ? c.dim - i : BLOCK, at = row * c.dim + i, p = row * wide + i;
      const float* z = fp32_block(c.pre, c.dtype, p, n, z_);
      const float* u = GATED ? fp32_block(c.pre, c.dtype, p + c.dim, n, u_) : nullptr;
      float* a = result_block(c.a, c.dtype, at, a_);
      forward<FORM, GATED>(a, z, u, n);
      write_block(a, c.a, c.dtype, at, n);
    }
  }
}

template <int FORM, bool GATED>
void all_backward(const Activation& c, int64_t begin, int64_t end) {
  float z_[BLOCK], u_[BLOCK], da_[BLOCK], a_[BLOCK], dz_[BLOCK], du_[BLOCK];
  const int64_t wide = GATED ? 2 * c.dim : c.dim;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < c.dim; i += BLOCK) {
      const int64_t n = c.dim - i < BLOCK ? c.dim - i : BLOCK, at = row * c.dim + i, p = row * wide + i;
      const float* z = fp32_block(c.pre, c.dtype, p, n, z_);
      const float* u = GATED ? fp32_block(c.pre, c.dtype, p + c.dim, n, u_) : nullptr;
      const float* da = fp32_block(c.grad_a, c.dtype, at, n, da_);
      float *a = result_block(c.a, c.dtype, at, a_), *dz = result_block(c.grad_pre, c.dtype, p, dz_);
      float* du = GATED ? result_block(c.grad_pre, c.dtype, p + c.dim, du_) : nullptr;
      backward<FORM, GATED>(a, dz, du, da, z, u, n);
      write_block(a, c.a, c.dtype, at, n);
      write_block(dz, c.grad_pre, c.dtype, p, n);
      if (GATED) write_block(du, c.grad_pre, c.dtype, p + c.dim, n);
    }
  }
}

}  // namespace

void activate(const Activation& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    with_form(c.form, [&](auto form) {
      if (c.gated) all_forward<decltype(form)::value, true>(c, begin, end);
      else all_forward<decltype(form)::value, false>(c, begin, end);
    });
  });
}

void activate_backward(const Activation& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    with_form(c.form, [&](auto form) {
      if (c.gated) all_backward<decltype(form)::value, true>(c, begin, end);
      else all_backward<decltype(form)::value, false>(c, begin, end);
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
