// Bias and GELU on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "bias_gelu_cpu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

const float* row_of(const void* memory, Dtype dtype, int64_t row, int64_t dim, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, row * dim, dim, buffer);
}

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

void bias_gelu_rows(const BiasGelu& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim;
  const float* b = row_of(c.bias, c.bias_dtype, 0, n, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = row_of(c.x, c.dtype, row, n, scratch + n);
    float* y = c.dtype == F32 ? static_cast<float*>(c.out) + row * n : scratch + 2 * n;
    if (c.form == GELU_TANH) forward<GELU_TANH>(y, x, b, n);
    else forward<GELU_ERF>(y, x, b, n);
    write_block(y, c.out, c.dtype, row * n, n);
  }
}

void bias_gelu_backward_rows(const BiasGelu& c, int64_t begin, int64_t end, float* scratch, float* part) {
  const int64_t n = c.dim;
  const float* b = row_of(c.bias, c.bias_dtype, 0, n, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = row_of(c.x, c.dtype, row, n, scratch + n);
    const float* dy = row_of(c.grad_y, c.dtype, row, n, scratch + 2 * n);
    float* dx = c.dtype == F32 ? static_cast<float*>(c.out) + row * n : scratch + 3 * n;
    if (c.form == GELU_TANH) backward<GELU_TANH>(dx, dy, x, b, part, n);
    else backward<GELU_ERF>(dx, dy, x, b, part, n);
    write_block(dx, c.out, c.dtype, row * n, n);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
