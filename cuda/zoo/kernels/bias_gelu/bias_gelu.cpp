// Bias and GELU on the CPU. Compiled once for each instruction set.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "bias_gelu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <Dtype D, int FORM>
void forward(const BiasGelu& c, int64_t row, const float* b) {
  const int64_t at = row * c.dim;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    store<D>(gelu_of<FORM>(load<D>(c.x, at + i, count) + load<F32>(b, i, count)), c.out, at + i, count);
  });
}

template <Dtype D, int FORM>
void backward(const BiasGelu& c, int64_t row, const float* b, float* db) {
  const int64_t at = row * c.dim;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    const Vec slope = gelu_grad<FORM>(load<D>(c.x, at + i, count) + load<F32>(b, i, count));
    const Vec dx = load<D>(c.grad_y, at + i, count) * slope;
    store<D>(dx, c.out, at + i, count);
    store<F32>(load<F32>(db, i, count) + dx, db, i, count);
  });
}

}  // namespace

void bias_gelu(const BiasGelu& c) {
  const int64_t n = c.dim;
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    with_dtype(c.dtype, [&](auto of) {
      constexpr Dtype D = decltype(of)::value;
      for (int64_t row = begin; row < end; ++row) {
        if (c.form == GELU_TANH) forward<D, GELU_TANH>(c, row, b);
        else forward<D, GELU_ERF>(c, row, b);
      }
    });
  });
}

void bias_gelu_backward(const BiasGelu& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows);
  split_evenly(count, 1, c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    each_part(c.rows, first, last, parts, n, [&](int64_t begin, int64_t end, float* part) {
      with_dtype(c.dtype, [&](auto of) {
        constexpr Dtype D = decltype(of)::value;
        for (int64_t row = begin; row < end; ++row) {
          if (c.form == GELU_TANH) backward<D, GELU_TANH>(c, row, b, part);
          else backward<D, GELU_ERF>(c, row, b, part);
        }
      });
    });
  });
  sum_parts(parts, count, n, c.grad_bias, c.bias_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
