// Bias and GELU on the CPU. Compiled once for each instruction set.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "bias_gelu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <int FORM>
void forward(float* __restrict y, const float* __restrict x, const float* __restrict b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = gelu_of<FORM>(x[i] + b[i]);
}

template <int FORM>
void backward(float* __restrict dx, const float* __restrict dy, const float* __restrict x, const float* __restrict b,
              float* __restrict db, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = dy[i] * gelu_grad<FORM>(x[i] + b[i]);
    db[i] += dx[i];
  }
}

}  // namespace

void bias_gelu(const BiasGelu& c) {
  const int64_t n = c.dim;
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    for (int64_t row = begin; row < end; ++row) {
      const float* x = fp32_block(c.x, c.dtype, row * n, n, scratch.data() + n);
      float* y = result_block(c.out, c.dtype, row * n, scratch.data() + 2 * n);
      if (c.form == GELU_TANH) forward<GELU_TANH>(y, x, b, n);
      else forward<GELU_ERF>(y, x, b, n);
      write_block(y, c.out, c.dtype, row * n, n);
    }
  });
}

void bias_gelu_backward(const BiasGelu& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows);
  split_evenly(count, 1, c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(4 * n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    each_part(c.rows, first, last, parts, n, [&](int64_t begin, int64_t end, float* part) {
      for (int64_t row = begin; row < end; ++row) {
        const float* x = fp32_block(c.x, c.dtype, row * n, n, scratch.data() + n);
        const float* dy = fp32_block(c.grad_y, c.dtype, row * n, n, scratch.data() + 2 * n);
        float* dx = result_block(c.out, c.dtype, row * n, scratch.data() + 3 * n);
        if (c.form == GELU_TANH) backward<GELU_TANH>(dx, dy, x, b, part, n);
        else backward<GELU_ERF>(dx, dy, x, b, part, n);
        write_block(dx, c.out, c.dtype, row * n, n);
      }
    });
  });
  sum_parts(parts, count, n, c.grad_bias, c.bias_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
