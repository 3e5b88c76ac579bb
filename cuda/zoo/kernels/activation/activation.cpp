// Activations on the CPU. Compiled once for each instruction set.
#include "../common/parallel.h"
#include "../common/vectors.h"
#include "activation.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// fn(FORM) as a constant.
template <class Fn>
void with_form(Form form, const Fn& fn) {
  if (form == SILU) fn(std::integral_constant<int, SILU>());
  else if (form == GELU) fn(std::integral_constant<int, GELU>());
  else if (form == GELU_BY_TANH) fn(std::integral_constant<int, GELU_BY_TANH>());
  else fn(std::integral_constant<int, RELU>());
}

template <Dtype D, int FORM, bool GATED>
void forward_row(const Activation& c, int64_t row) {
  const int64_t at = row * c.dim, p = GATED ? 2 * at : at;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    Vec none;
    const Vec y = activation_of<FORM, false>(load<D>(c.pre, p + i, count), none);
    store<D>(GATED ? y * load<D>(c.pre, p + c.dim + i, count) : y, c.a, at + i, count);
  });
}

template <Dtype D, int FORM, bool GATED>
void backward_row(const Activation& c, int64_t row) {
  const int64_t at = row * c.dim, p = GATED ? 2 * at : at;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    Vec slope;
    const Vec y = activation_of<FORM, true>(load<D>(c.pre, p + i, count), slope), da = load<D>(c.grad_a, at + i, count);
    if constexpr (GATED) {
      const Vec u = load<D>(c.pre, p + c.dim + i, count);
      store<D>(y * u, c.a, at + i, count);
      store<D>((da * u) * slope, c.grad_pre, p + i, count);
      store<D>(da * y, c.grad_pre, p + c.dim + i, count);
    } else {
      store<D>(y, c.a, at + i, count);
      store<D>(da * slope, c.grad_pre, p + i, count);
    }
  });
}

template <bool BACKWARD>
void run(const Activation& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    with_dtype(c.dtype, [&](auto of) {
      with_form(c.form, [&](auto form) {
        constexpr Dtype D = decltype(of)::value;
        constexpr int FORM = decltype(form)::value;
        const auto row = BACKWARD ? c.gated ? backward_row<D, FORM, true> : backward_row<D, FORM, false>
                         : c.gated ? forward_row<D, FORM, true> : forward_row<D, FORM, false>;
        for (int64_t t = begin; t < end; ++t) row(c, t);
      });
    });
  });
}

}  // namespace

void activate(const Activation& c) { run<false>(c); }

void activate_backward(const Activation& c) { run<true>(c); }

}  // namespace ZOO_ISA
}  // namespace zoo
