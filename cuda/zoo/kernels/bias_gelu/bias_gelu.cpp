// Bias and GELU on the CPU. Compiled once for each instruction set.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "bias_gelu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <Dtype D, int FORM>
void forward(void* y, const void* x, int64_t at, const float* b, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    store<D>(gelu_of<FORM>(load<D>(x, at + i, count) + load<F32>(b, i, count)), y, at + i, count);
  });
}

template <Dtype D, int FORM>
void backward(void* to, const void* dy, const void* x, int64_t at, const float* b, float* db, int64_t n) {
  each_vector(n, [&](int64_t i, int64_t count) {
    const Vec slope = gelu_grad<FORM>(load<D>(x, at + i, count) + load<F32>(b, i, count));
    const Vec dx = load<D>(dy, at + i, count) * slope;
    store<D>(dx, to, at + i, count);
    store<F32>(load<F32>(db, i, count) + dx, db, i, count);
  });
}

// Whether rows go through buffers of fp32: where no instruction widens 16 bits, a loop over a row does it faster.
bool is_buffered(const BiasGelu& c) { return WIDTH == 4 && c.dtype != F32; }

}  // namespace

void bias_gelu(const BiasGelu& c) {
  const int64_t n = c.dim;
  const bool buffered = is_buffered(c);
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    float* const out = scratch.data() + 2 * n;
    with_dtype(buffered ? F32 : c.dtype, [&](auto of) {
      constexpr Dtype D = decltype(of)::value;
      for (int64_t row = begin; row < end; ++row) {
        const void* x = buffered ? fp32_block(c.x, c.dtype, row * n, n, scratch.data() + n) : c.x;
        void* y = buffered ? out : c.out;
        if (c.form == GELU_TANH) forward<D, GELU_TANH>(y, x, buffered ? 0 : row * n, b, n);
        else forward<D, GELU_ERF>(y, x, buffered ? 0 : row * n, b, n);
        if (buffered) write_block(out, c.out, c.dtype, row * n, n);
      }
    });
  });
}

void bias_gelu_backward(const BiasGelu& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows);
  const bool buffered = is_buffered(c);
  split_evenly(count, 1, c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(4 * n);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    float* const out = scratch.data() + 3 * n;
    each_part(c.rows, first, last, parts, n, [&](int64_t begin, int64_t end, float* part) {
      with_dtype(buffered ? F32 : c.dtype, [&](auto of) {
        constexpr Dtype D = decltype(of)::value;
        for (int64_t row = begin; row < end; ++row) {
          const int64_t at = buffered ? 0 : row * n;
          const void* x = buffered ? fp32_block(c.x, c.dtype, row * n, n, scratch.data() + n) : c.x;
          const void* dy = buffered ? fp32_block(c.grad_y, c.dtype, row * n, n, scratch.data() + 2 * n) : c.grad_y;
          void* dx = buffered ? out : c.out;
          if (c.form == GELU_TANH) backward<D, GELU_TANH>(dx, dy, x, at, b, part, n);
          else backward<D, GELU_ERF>(dx, dy, x, at, b, part, n);
          if (buffered) write_block(out, c.out, c.dtype, row * n, n);
        }
      });
    });
  });
  sum_parts(parts, count, n, c.grad_bias, c.bias_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
