// Layer normalisation on the CPU. Compiled once for each instruction set; a row is as long as the caches are for.
#include "../common/blocks.h"
#include "../common/lanes.h"
#include "layer_norm_cpu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

const float* block_of(const void* memory, Dtype dtype, int64_t at, int64_t n, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, at, n, buffer);
}

// A block of s as fp32: of x itself, or of the sum, which is written and read back as it was rounded.
const float* sum_block(const LayerNorm& c, int64_t at, int64_t n, float* buffer) {
  const float* x = block_of(c.x, c.dtype, at, n, buffer);
  if (c.residual == nullptr) return x;
  alignas(64) float second[BLOCK];
  const float* r = block_of(c.residual, c.dtype, at, n, second);
  float* s = c.dtype == F32 ? static_cast<float*>(c.sum) + at : buffer;
  for (int64_t i = 0; i < n; ++i) s[i] = x[i] + r[i];
  if (c.dtype == F32) return s;
  narrow(s, c.sum, c.dtype, at, n);
  return block_of(c.sum, c.dtype, at, n, buffer);
}

void write_row(float* __restrict y, const float* __restrict s, const float* __restrict w, const float* __restrict b,
               float mean, float rstd, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = layer_norm_of(s[i], mean, rstd, w[i], b[i]);
}

// Of a block: x̂ and g, and dw and db added up.
void first_pass(const float* __restrict dy, const float* __restrict s, const float* __restrict w, float mean, float rstd,
                float* __restrict hat, float* __restrict g, float* __restrict dw, float* __restrict db, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    hat[i] = normalised(s[i], mean, rstd);
    g[i] = dy[i] * w[i];
    dw[i] += dy[i] * hat[i];
    db[i] += dy[i];
  }
}

// dx of a block; x̂ and g again, which costs less than to keep those of a row.
void second_pass(float* __restrict dx, const float* __restrict dy, const float* __restrict s, const float* __restrict w,
                 float mean, float rstd, float alpha, float beta, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    dx[i] = layer_norm_grad(dy[i] * w[i], normalised(s[i], mean, rstd), alpha, beta, rstd);
}

}  // namespace

void layer_norm_rows(const LayerNorm& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim, stride = padded(n);
  const float* w = block_of(c.weight, c.weight_dtype, 0, n, scratch);
  const float* b = block_of(c.bias, c.weight_dtype, 0, n, scratch + stride);
  float* buffer = scratch + 2 * stride;
  alignas(64) float out[BLOCK];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * n;
    const float* s = nullptr;
    Lanes lanes = {};  // blocks are multiples of the lanes
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      const float* block = sum_block(c, first + at, m, buffer + at);
      if (at == 0) s = block;
      add_to_lanes(lanes, m, [block](int64_t i) { return block[i]; });
    }
    const float mean = fold(lanes) * c.inverse_dim;
    const float variance = lane_sum(n, [s, mean](int64_t i) { return (s[i] - mean) * (s[i] - mean); }) * c.inverse_dim;
    const float rstd = rstd_of(variance, c.eps);
    c.mean[row] = mean;
    c.rstd[row] = rstd;
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      float* y = c.dtype == F32 ? static_cast<float*>(c.y) + first + at : out;
      write_row(y, s + at, w + at, b + at, mean, rstd, m);
      write_block(y, c.y, c.dtype, first + at, m);
    }
  }
}

void layer_norm_backward_rows(const LayerNormBackward& c, int64_t begin, int64_t end, float* scratch, float* parts) {
  const int64_t n = c.dim;
  const float* w = block_of(c.weight, c.weight_dtype, 0, n, scratch);
  float *dw = parts, *db = parts + padded(n);
  alignas(64) float hat[BLOCK], g[BLOCK], first[BLOCK], second[BLOCK];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t start = row * n;
    const float mean = c.mean[row], rstd = c.rstd[row];
    Lanes of_g = {}, of_products = {};
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      const float* dy = block_of(c.grad_y, c.dtype, start + at, m, first);
      const float* s = block_of(c.sum, c.dtype, start + at, m, second);
      first_pass(dy, s, w + at, mean, rstd, hat, g, dw + at, db + at, m);
      add_to_lanes(of_g, m, [&g](int64_t i) { return g[i]; });
      add_to_lanes(of_products, m, [&g, &hat](int64_t i) { return g[i] * hat[i]; });
    }
    const float alpha = fold(of_g) * c.inverse_dim, beta = fold(of_products) * c.inverse_dim;
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      const float* dy = block_of(c.grad_y, c.dtype, start + at, m, first);
      const float* s = block_of(c.sum, c.dtype, start + at, m, second);
      float* dx = c.dtype == F32 ? static_cast<float*>(c.grad_x) + start + at : g;
      second_pass(dx, dy, s, w + at, mean, rstd, alpha, beta, m);
      if (c.grad_sum != nullptr) {
        const float* ds = block_of(c.grad_sum, c.dtype, start + at, m, first);
        for (int64_t i = 0; i < m; ++i) dx[i] += ds[i];
      }
      write_block(dx, c.grad_x, c.dtype, start + at, m);
    }
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
