// Softmax on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "softmax.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

void scaled(float* __restrict v, const float* __restrict x, const float* __restrict m, float scale, int64_t n) {
  if (m == nullptr)
    for (int64_t i = 0; i < n; ++i) v[i] = scale * x[i];
  else
    for (int64_t i = 0; i < n; ++i) v[i] = scale * x[i] + m[i];
}

void exponentials(float* __restrict e, const float* __restrict v, float shift, int64_t n) {
  for (int64_t i = 0; i < n; ++i) e[i] = exp_of(v[i] - shift);
}

void write_grad(float* __restrict dx, const float* __restrict y, const float* __restrict dy, float scale, float dot,
                int64_t n) {
  for (int64_t i = 0; i < n; ++i) dx[i] = softmax_grad(scale, y[i], dy[i], dot);
}

}  // namespace

void softmax(const Softmax& c) {
  split_evenly(c.rows, 1, c.rows * c.keys, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * c.keys);
    float *v = scratch.data(), *first = v + c.keys, *second = first + c.keys;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * c.keys, n = visible_keys(c, row);
      const float* x = fp32_block(c.x, c.dtype, at, n, first);
      const int64_t offset = c.mask == nullptr ? 0 : mask_offset(c, row);
      const float* m = fp32_block(c.mask, c.mask_dtype, offset, n, second);
      scaled(v, x, m, c.scale, n);
      float* y = result_block(c.y, c.dtype, at, first);
      exponentials(y, v, shift_of(lane_maximum(n, [v](int64_t i) { return v[i]; })), n);
      const float inverse = inverse_of(lane_sum(n, [y](int64_t i) { return y[i]; }));
      for (int64_t i = 0; i < n; ++i) y[i] = y[i] * inverse;
      const float hidden = hidden_of(inverse);
      for (int64_t i = n; i < c.keys; ++i) y[i] = hidden;
      write_block(y, c.y, c.dtype, at, c.keys);
    }
  });
}

void softmax_backward(const SoftmaxBackward& c) {
  const int64_t n = c.keys;
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * n);
    for (int64_t row = begin; row < end; ++row) {
      const float* y = fp32_block(c.y, c.dtype, row * n, n, scratch.data());
      const float* dy = fp32_block(c.grad_y, c.dtype, row * n, n, scratch.data() + n);
      const float dot = lane_sum(n, [y, dy](int64_t i) { return dy[i] * y[i]; });
      float* dx = result_block(c.grad_x, c.dtype, row * n, scratch.data() + 2 * n);
      write_grad(dx, y, dy, c.scale, dot, n);
      write_block(dx, c.grad_x, c.dtype, row * n, n);
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
