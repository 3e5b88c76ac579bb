// Layer normalisation on the CPU. Compiled once for each instruction set; a row is as long as the caches are for.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "layer_norm.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// Rows [begin, end). Sweeps that read what the caches have leave memory idle: there the next row is asked for, and what is to
// be written, in the sweep where that measured best.
template <Dtype D, bool SUM>
void forward_rows(const LayerNorm& c, const float* w, const float* b, int64_t begin, int64_t end) {
  const int64_t n = c.dim;
  const void* const total = SUM ? c.sum : c.x;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * n;
    LaneVectors sums = {}, squares = {};
    each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
      Vec s = load<D>(c.x, first + i, count);
      if constexpr (SUM) {
        s = store<D>(s + load<D>(c.residual, first + i, count), c.sum, first + i, count);
        if constexpr (D != F32) ask_for<D>(c.y, first + i);
      }
      sums.at[k] += s;
    });
    const float mean = sums.sum() * c.inverse_dim;
    each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
      const Vec away = load<D>(total, first + i, count) - mean;
      squares.at[k] += first_of(away * away, count);
      if constexpr (D != F32) ask_for<D>(SUM ? c.sum : c.y, SUM ? first + n + i : first + i);
    });
    const float rstd = rstd_of(squares.sum() * c.inverse_dim, c.eps);
    c.mean[row] = mean;
    c.rstd[row] = rstd;
    each_vector(n, [&](int64_t i, int64_t count) {
      ask_for<D>(c.x, first + n + i);
      if constexpr (SUM) ask_for<D>(c.residual, first + n + i);
      else if constexpr (D == F32) ask_for<D>(c.y, first + n + i);
      const Vec s = load<D>(total, first + i, count);
      store<D>(layer_norm_of(s, spread(mean), spread(rstd), load<F32>(w, i, count), load<F32>(b, i, count)), c.y, first + i,
               count);
    });
  }
}

// One part of rows: dx, and dw and db added up. x̂ and g are computed twice, which costs less than to keep those of a row.
// The second sweep asks for the next row.
template <Dtype D>
void backward_rows(const LayerNormBackward& c, const float* w, int64_t begin, int64_t end, float* part) {
  const int64_t n = c.dim;
  float *dw = part, *db = part + padded(n);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * n;
    const Vec mean = spread(c.mean[row]), rstd = spread(c.rstd[row]);
    LaneVectors of_g = {}, of_products = {};
    each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
      const Vec dy = load<D>(c.grad_y, first + i, count), s = load<D>(c.sum, first + i, count);
      const Vec hat = normalised(s, mean, rstd), g = dy * load<F32>(w, i, count);
      store<F32>(load<F32>(dw, i) + dy * hat, dw, i);
      store<F32>(load<F32>(db, i) + dy, db, i);
      of_g.at[k] += g;
      of_products.at[k] += first_of(g * hat, count);
    });
    const Vec alpha = spread(of_g.sum() * c.inverse_dim), beta = spread(of_products.sum() * c.inverse_dim);
    each_vector(n, [&](int64_t i, int64_t count) {
      const Vec dy = load<D>(c.grad_y, first + i, count), s = load<D>(c.sum, first + i, count);
      Vec dx = layer_norm_grad(dy * load<F32>(w, i, count), normalised(s, mean, rstd), alpha, beta, rstd);
      if (c.grad_sum != nullptr) dx += load<D>(c.grad_sum, first + i, count);
      store<D>(dx, c.grad_x, first + i, count);
      ask_for<D>(c.grad_y, first + n + i);
      ask_for<D>(c.sum, first + n + i);
    });
  }
}

}  // namespace

void layer_norm(const LayerNorm& c) {
  const int64_t n = c.dim, stride = padded(n);
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(2 * stride);
    const float* w = fp32_block(c.weight, c.weight_dtype, 0, n, scratch.data());
    const float* b = fp32_block(c.bias, c.weight_dtype, 0, n, scratch.data() + stride);
    with_dtype(c.dtype, [&](auto of) {
      constexpr Dtype D = decltype(of)::value;
      if (c.residual != nullptr) forward_rows<D, true>(c, w, b, begin, end);
      else forward_rows<D, false>(c, w, b, begin, end);
    });
  });
}

void layer_norm_backward(const LayerNormBackward& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows), width = parts_width(n);
  split_evenly(count, 1, c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(n);
    const float* w = fp32_block(c.weight, c.weight_dtype, 0, n, scratch.data());
    each_part(c.rows, first, last, parts, width, [&](int64_t begin, int64_t end, float* part) {
      with_dtype(c.dtype, [&](auto of) { backward_rows<decltype(of)::value>(c, w, begin, end, part); });
    });
  });
  sum_parts(parts, count, width, c.grad_weight, c.weight_dtype, n);
  sum_parts(parts + padded(n), count, width, c.grad_bias, c.weight_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
