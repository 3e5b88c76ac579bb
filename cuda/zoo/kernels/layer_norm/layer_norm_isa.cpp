// Layer normalisation on the CPU. Compiled once for each instruction set; a row is as long as the caches are for.
#include "../common/blocks.h"
#include "../common/lanes.h"
#include "layer_norm_cpu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

const float* row_of(const void* memory, Dtype dtype, int64_t row, int64_t dim, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, row * dim, dim, buffer);
}

// s of a row as fp32: x itself, or the sum, which is written and read back as it was rounded.
const float* row_sum(const LayerNorm& c, int64_t row, float* buffer, float* second) {
  const float* x = row_of(c.x, c.dtype, row, c.dim, buffer);
  if (c.residual == nullptr) return x;
  const float* r = row_of(c.residual, c.dtype, row, c.dim, second);
  float* __restrict s = c.dtype == F32 ? static_cast<float*>(c.sum) + row * c.dim : buffer;
  for (int64_t i = 0; i < c.dim; ++i) s[i] = x[i] + r[i];
  if (c.dtype == F32) return s;
  narrow(s, c.sum, c.dtype, row * c.dim, c.dim);
  return row_of(c.sum, c.dtype, row, c.dim, buffer);
}

void write_row(float* __restrict y, const float* __restrict s, const float* __restrict w, const float* __restrict b,
               float mean, float rstd, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = layer_norm_of(s[i], mean, rstd, w[i], b[i]);
}

// Of a row: x̂ and g, and dw and db added up.
void first_pass(const float* __restrict dy, const float* __restrict s, const float* __restrict w, float mean, float rstd,
                float* __restrict hat, float* __restrict g, float* __restrict dw, float* __restrict db, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    hat[i] = normalised(s[i], mean, rstd);
    g[i] = dy[i] * w[i];
    dw[i] += dy[i] * hat[i];
    db[i] += dy[i];
  }
}

void second_pass(float* __restrict dx, const float* __restrict g, const float* __restrict hat, float alpha, float beta,
                 float rstd, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dx[i] = layer_norm_grad(g[i], hat[i], alpha, beta, rstd);
}

}  // namespace

void layer_norm_rows(const LayerNorm& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim;
  const float* w = row_of(c.weight, c.weight_dtype, 0, n, scratch);
  const float* b = row_of(c.bias, c.weight_dtype, 0, n, scratch + n);
  float *buffer = scratch + 2 * n, *second = scratch + 3 * n;
  for (int64_t row = begin; row < end; ++row) {
    const float* s = row_sum(c, row, buffer, second);
    const float mean = lane_sum(n, [s](int64_t i) { return s[i]; }) * c.inverse_dim;
    const float variance = lane_sum(n, [s, mean](int64_t i) { return (s[i] - mean) * (s[i] - mean); }) * c.inverse_dim;
    const float rstd = rstd_of(variance, c.eps);
    c.mean[row] = mean;
    c.rstd[row] = rstd;
    float* y = c.dtype == F32 ? static_cast<float*>(c.y) + row * n : second;
    write_row(y, s, w, b, mean, rstd, n);
    write_block(y, c.y, c.dtype, row * n, n);
  }
}

void layer_norm_backward_rows(const LayerNormBackward& c, int64_t begin, int64_t end, float* scratch, float* parts) {
  const int64_t n = c.dim;
  const float* w = row_of(c.weight, c.weight_dtype, 0, n, scratch);
  float *hat = scratch + n, *g = scratch + 2 * n, *first = scratch + 3 * n, *second = scratch + 4 * n;
  for (int64_t row = begin; row < end; ++row) {
    const float* dy = row_of(c.grad_y, c.dtype, row, n, first);
    const float* s = row_of(c.sum, c.dtype, row, n, second);
    const float rstd = c.rstd[row];
    first_pass(dy, s, w, c.mean[row], rstd, hat, g, parts, parts + n, n);
    const float alpha = lane_sum(n, [g](int64_t i) { return g[i]; }) * c.inverse_dim;
    const float beta = lane_sum(n, [g, hat](int64_t i) { return g[i] * hat[i]; }) * c.inverse_dim;
    float* dx = c.dtype == F32 ? static_cast<float*>(c.grad_x) + row * n : second;
    second_pass(dx, g, hat, alpha, beta, rstd, n);
    if (c.grad_sum != nullptr) {
      const float* __restrict ds = row_of(c.grad_sum, c.dtype, row, n, first);
      for (int64_t i = 0; i < n; ++i) dx[i] += ds[i];
    }
    write_block(dx, c.grad_x, c.dtype, row * n, n);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
