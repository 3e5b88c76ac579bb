// Gating on the CPU: what is arithmetic on rows. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "gating_cpu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

const float* row_of(const void* memory, Dtype dtype, int64_t row, int64_t dim, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, row * dim, dim, buffer);
}

float element(const void* memory, Dtype dtype, int64_t i) {
  float buffer;
  return *fp32_block(const_cast<void*>(memory), dtype, i, 1, &buffer);
}

// e = exp(v - M).
void exponentials(float* __restrict e, const float* __restrict v, float maximum, int64_t n) {
  const float shift = shift_of(maximum);
  for (int64_t i = 0; i < n; ++i) e[i] = exp_of(v[i] - shift);
}

// The k experts before all others, in their order; an equal one that comes later stays behind.
void choose(const float* v, int64_t n, int64_t k, float* best, int64_t* index) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (found == k && !before(v[i], best[k - 1])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && before(v[i], best[at - 1]); --at) {
      best[at] = best[at - 1];
      index[at] = index[at - 1];
    }
    best[at] = v[i];
    index[at] = i;
  }
}

float inverse_sum(const float* e, int64_t n, const int64_t* index, int64_t k, bool renormalise) {
  if (!renormalise) return inverse_of(lane_sum(n, [e](int64_t i) { return e[i]; }));
  float sum = 0.0f;
  for (int64_t j = 0; j < k; ++j) sum += e[index[j]];
  return inverse_of(sum);
}

void add(float* __restrict sum, const float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += y[i];
}

void add_scaled(float* __restrict sum, const float* __restrict y, float w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += w * y[i];
}

}  // namespace

void gate_rows(const Gate& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.experts, k = c.choices;
  float *buffer = scratch, *e = scratch + n, *best = scratch + 2 * n;
  for (int64_t t = begin; t < end; ++t) {
    const float* v = row_of(c.logits, c.dtype, t, n, buffer);
    int64_t* index = c.indices + t * k;
    choose(v, n, k, best, index);
    exponentials(e, v, best[0], n);
    const float inverse = inverse_sum(e, n, index, k, c.renormalise);
    for (int64_t j = 0; j < k; ++j) c.probabilities[t * k + j] = e[index[j]] * inverse;
  }
}

void gate_backward_rows(const GateBackward& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.experts, k = c.choices;
  float *buffer = scratch, *e = scratch + n, *g = scratch + 2 * n;
  for (int64_t t = begin; t < end; ++t) {
    const float *v = row_of(c.logits, c.dtype, t, n, buffer), *dw = c.grad_probabilities + t * k;
    const int64_t* index = c.indices + t * k;
    exponentials(e, v, lane_maximum(n, [v](int64_t i) { return v[i]; }), n);
    const float inverse = inverse_sum(e, n, index, k, c.renormalise);
    float dot = 0.0f;
    for (int64_t j = 0; j < k; ++j) dot += dw[j] * (e[index[j]] * inverse);
    if (c.renormalise) {  // at experts not chosen e is 0: what is needed of e moves to the buffer, v is done with
      for (int64_t j = 0; j < k; ++j) g[j] = e[index[j]];
      for (int64_t i = 0; i < n; ++i) buffer[i] = 0.0f;
      for (int64_t j = 0; j < k; ++j) buffer[index[j]] = g[j];
      e = buffer;
    }
    for (int64_t i = 0; i < n; ++i) g[i] = 0.0f;
    for (int64_t j = 0; j < k; ++j) g[index[j]] += dw[j];
    float* dv = c.dtype == F32 ? static_cast<float*>(c.grad_logits) + t * n : g;
    for (int64_t i = 0; i < n; ++i) dv[i] = gate_grad(e[i] * inverse, g[i], dot);
    write_block(dv, c.grad_logits, c.dtype, t * n, n);
    e = scratch + n;
  }
}

void unpermute_rows(const Unpermute& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim;
  for (int64_t t = begin; t < end; ++t) {
    float* sum = c.dtype == F32 ? static_cast<float*>(c.out) + t * n : scratch + n;
    for (int64_t i = 0; i < n; ++i) sum[i] = 0.0f;
    for (int64_t j = 0; j < c.choices; ++j) {
      const int64_t at = t * c.choices + j;
      if (c.rows[at] < 0) continue;
      const float* y = row_of(c.y, c.dtype, c.rows[at], n, scratch);
      if (c.weights == nullptr) add(sum, y, n);
      else add_scaled(sum, y, element(c.weights, c.weight_dtype, at), n);
    }
    write_block(sum, c.out, c.dtype, t * n, n);
  }
}

void unpermute_backward_rows(const UnpermuteBackward& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim, bytes = n * size_of(c.dtype);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = c.source[row];
    if (at < 0) {
      if (bytes > 0) memset(static_cast<char*>(c.grad_y) + row * bytes, 0, size_t(bytes));
      continue;
    }
    const float* g = row_of(c.grad_out, c.dtype, at / c.choices, n, scratch);
    const float* y = row_of(c.y, c.dtype, row, n, scratch + n);
    const float dw = lane_sum(n, [g, y](int64_t i) { return g[i] * y[i]; });
    narrow(&dw, c.grad_weights, c.weight_dtype, at, 1);
    const float w = element(c.weights, c.weight_dtype, at);
    float* __restrict dy = c.dtype == F32 ? static_cast<float*>(c.grad_y) + row * n : scratch + 2 * n;
    for (int64_t i = 0; i < n; ++i) dy[i] = w * g[i];
    write_block(dy, c.grad_y, c.dtype, row * n, n);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
