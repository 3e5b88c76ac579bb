// Layer normalisation on the CPU. Compiled once for each instruction set; a row is as long as the caches are for.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "layer_norm.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// A block of s as fp32: of x itself, or of the sum, which is written and read back as it was rounded.
const float* sum_block(const LayerNorm& c, int64_t at, int64_t n, float* buffer) {
  const float* x = fp32_block(c.x, c.dtype, at, n, buffer);
  if (c.residual == nullptr) return x;
  alignas(64) float second[BLOCK];
  const float* r = fp32_block(c.residual, c.dtype, at, n, second);
  float* s = c.dtype == F32 ? static_cast<float*>(c.sum) + at : buffer;
  for (int64_t i = 0; i < n; ++i) s[i] = x[i] + r[i];
  if (c.dtype == F32) return s;
  narrow(s, c.sum, c.dtype, at, n);
  return fp32_block(c.sum, c.dtype, at, n, buffer);
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

// One part of rows: dx, and dw and db added up.
void backward_rows(const LayerNormBackward& c, const float* w, int64_t begin, int64_t end, float* part) {
  const int64_t n = c.dim;
  float *dw = part, *db = part + padded(n);
  alignas(64) float hat[BLOCK], g[BLOCK], first[BLOCK], second[BLOCK];
  for (int64_t row = begin; row < end; ++row) {
    const int64_t start = row * n;
    const float mean = c.mean[row], rstd = c.rstd[row];
    Lanes of_g = {}, of_products = {};
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      const float* dy = fp32_block(c.grad_y, c.dtype, start + at, m, first);
      const float* s = fp32_block(c.sum, c.dtype, start + at, m, second);
      first_pass(dy, s, w + at, mean, rstd, hat, g, dw + at, db + at, m);
      add_to_lanes(of_g, m, [&g](int64_t i) { return g[i]; });
      add_to_lanes(of_products, m, [&g, &hat](int64_t i) { return g[i] * hat[i]; });
    }
    const float alpha = fold(of_g) * c.inverse_dim, beta = fold(of_products) * c.inverse_dim;
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      const float* dy = fp32_block(c.grad_y, c.dtype, start + at, m, first);
      const float* s = fp32_block(c.sum, c.dtype, start + at, m, second);
      float* dx = result_block(c.grad_x, c.dtype, start + at, g);
      second_pass(dx, dy, s, w + at, mean, rstd, alpha, beta, m);
      if (c.grad_sum != nullptr) {
        const float* ds = fp32_block(c.grad_sum, c.dtype, start + at, m, first);
        for (int64_t i = 0; i < m; ++i) dx[i] += ds[i];
      }
      write_block(dx, c.grad_x, c.dtype, start + at, m);
    }
  }
}

}  // namespace

void layer_norm(const LayerNorm& c) {
  const int64_t n = c.dim, stride = padded(n);
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * stride);
    const float* w = fp32_block(c.weight, c.weight_dtype, 0, n, scratch.data());
    const float* b = fp32_block(c.bias, c.weight_dtype, 0, n, scratch.data() + stride);
    float* buffer = scratch.data() + 2 * stride;
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
        float* y = result_block(c.y, c.dtype, first + at, out);
        write_row(y, s + at, w + at, b + at, mean, rstd, m);
        write_block(y, c.y, c.dtype, first + at, m);
      }
    }
  });
}

void layer_norm_backward(const LayerNormBackward& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows), width = parts_width(n);
  split_evenly(count, 1, c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(n);
    const float* w = fp32_block(c.weight, c.weight_dtype, 0, n, scratch.data());
    each_part(c.rows, first, last, parts, width,
              [&](int64_t begin, int64_t end, float* part) { backward_rows(c, w, begin, end, part); });
  });
  sum_parts(parts, count, width, c.grad_weight, c.weight_dtype, n);
  sum_parts(parts + padded(n), count, width, c.grad_bias, c.weight_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
