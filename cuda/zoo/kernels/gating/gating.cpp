// Gating on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "gating.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

const float* row_of(const void* memory, Dtype dtype, int64_t row, int64_t dim, float* buffer) {
  return fp32_block(memory, dtype, row * dim, dim, buffer);
}

float element(const void* memory, Dtype dtype, int64_t i) {
  float buffer;
  return *fp32_block(memory, dtype, i, 1, &buffer);
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

// Tokens, or rows, [begin, end). `scratch`, in floats: 2·E + k, 3·E, 2·D and 3·D.
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
    float* dv = result_block(c.grad_logits, c.dtype, t * n, g);
    for (int64_t i = 0; i < n; ++i) dv[i] = gate_grad(e[i] * inverse, g[i], dot);
    write_block(dv, c.grad_logits, c.dtype, t * n, n);
    e = scratch + n;
  }
}

void unpermute_rows(const Unpermute& c, int64_t begin, int64_t end, float* scratch) {
  const int64_t n = c.dim;
  for (int64_t t = begin; t < end; ++t) {
    float* sum = result_block(c.out, c.dtype, t * n, scratch + n);
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
    float* __restrict dy = result_block(c.grad_y, c.dtype, row * n, scratch + 2 * n);
    for (int64_t i = 0; i < n; ++i) dy[i] = w * g[i];
    write_block(dy, c.grad_y, c.dtype, row * n, n);
  }
}

// From this size of y on permute writes past the caches, which would not keep y: twice as fast then, and still faster if y
// is read at once (measured on Zen 4 with 1 MB of L2: no gain up to 8 MB, a loss up to 4).
constexpr int64_t STREAMED = 16 << 20;

void copy_bytes(char* to, const char* from, int64_t n) { memcpy(to, from, size_t(n)); }

void copy_past_caches(char* to, const char* from, int64_t n) {
#if defined(__SSE2__)
  constexpr int64_t size = 4 * WIDTH;
  const int64_t past = int64_t(reinterpret_cast<uintptr_t>(to) % size), head = past == 0 ? 0 : size - past;
  int64_t i = head < n ? head : n;
  copy_bytes(to, from, i);
  for (; i + size <= n; i += size) {
#if defined(__AVX512BW__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
#else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#endif
  }
  copy_bytes(to + i, from + i, n - i);
#else
  copy_bytes(to, from, n);
#endif
}

// What was written past the caches is in memory before a thread goes on.
void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// fn(place in memory, expert) for the assignments [begin, end) in the order of priority.
template <class Fn>
void each_assignment(const Places& c, int64_t begin, int64_t end, const Fn& fn) {
  if (!c.choices_first) {
    for (int64_t s = begin; s < end; ++s) fn(s, c.indices[s]);
    return;
  }
  const int64_t total = c.tokens * c.choices;
  for (int64_t s = begin, at = begin < end ? assignment(c, begin) : 0; s < end; ++s) {
    fn(at, c.indices[at]);
    at += c.choices;
    if (at >= total) at -= total - 1;  // on to the first token's next choice
  }
}

// The n-th greatest of `count` keys, a byte at a time from the top: no sort, and as fast for any keys.
uint32_t nth_greatest(const uint32_t* keys, int64_t count, int64_t n) {
  uint32_t found = 0, mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    int64_t with_byte[256] = {};
    for (int64_t i = 0; i < count; ++i)
      if ((keys[i] & mask) == found) ++with_byte[(keys[i] >> shift) & 255];
    uint32_t byte = 255;
    for (; n > with_byte[byte]; --byte) n -= with_byte[byte];
    found |= byte << shift;
    mask |= 255u << shift;
  }
  return found;
}

// Of n assignments to one expert, at `at` in the order of priority and with these keys, the first capacity ones by key get
// places in that order; n is above the capacity.
void keep_greatest(const Places& c, const int64_t* at, const uint32_t* keys, int64_t n) {
  uint32_t least = 0xFFFFFFFFu;  // of what is kept
  int64_t ties = 0;              // how many of those that are equal to it
  if (c.capacity > 0) {
    least = nth_greatest(keys, n, c.capacity);
    ties = c.capacity;
    for (int64_t i = 0; i < n; ++i) ties -= keys[i] > least;
  }
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool equal = keys[i] == least, kept = keys[i] > least || (equal && ties > 0);
    ties -= equal;
    c.positions[at[i]] = kept ? place : -1;
    place += kept;
  }
}

// Once every assignment has its place among all of its expert: that of experts whose demand is above the capacity.
void places_by_key(const Places& c) {
  const Scratch<int64_t> first_memory(c.experts);
  int64_t* const first = first_memory.data();
  int64_t total = 0;
  for (int64_t e = 0; e < c.experts; ++e) {
    first[e] = total;
    if (c.demand[e] > c.capacity) total += c.demand[e];
  }
  if (total == 0) return;
  const Scratch<int64_t> at(total);
  const Scratch<uint32_t> keys(total);
  const int64_t n = c.tokens * c.choices;
  split_evenly(n, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = c.indices[i];
      if (c.demand[e] <= c.capacity) continue;
      const int64_t to = first[e] + c.positions[i];
      at.data()[to] = i;
      keys.data()[to] = key_of(c, i);
    }
  });
  split_evenly(c.experts, 1, total, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e)
      if (c.demand[e] > c.capacity) keep_greatest(c, at.data() + first[e], keys.data() + first[e], c.demand[e]);
  });
}

}  // namespace

void top_k_gate(const Gate& c) {
  split_evenly(c.tokens, 1, c.tokens * c.experts, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(2 * c.experts + c.choices);
    gate_rows(c, begin, end, scratch.data());
  });
}

void top_k_gate_backward(const GateBackward& c) {
  split_evenly(c.tokens, 1, c.tokens * c.experts, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * c.experts);
    gate_backward_rows(c, begin, end, scratch.data());
  });
}

void positions_in_expert(const Places& c) {
  const int64_t n = c.tokens * c.choices, parts = num_threads_for(n);
  const Scratch<int64_t> memory(parts * c.experts);
  int64_t* const taken = memory.data();
  for (int64_t i = 0; i < parts * c.experts; ++i) taken[i] = 0;
  const auto of_parts = [&](const auto& fn) {
    split_evenly(parts, 1, n, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        int64_t* mine = taken + p * c.experts;
        each_assignment(c, n * p / parts, n * (p + 1) / parts, [&](int64_t at, int64_t e) { fn(at, mine[e]++); });
      }
    });
  };
  of_parts([](int64_t, int64_t) {});
  for (int64_t e = 0; e < c.experts; ++e) {
    int64_t sum = 0;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t mine = taken[p * c.experts + e];
      taken[p * c.experts + e] = sum;
      sum += mine;
    }
    c.demand[e] = sum;
    c.counts[e] = count_of(sum, c.capacity);
  }
  const int64_t capacity = capacity_in_order(c);
  of_parts([&](int64_t at, int64_t before_me) { c.positions[at] = place_of(before_me, capacity); });
  if (c.key != nullptr && c.capacity >= 0) places_by_key(c);
}

void permute(const Permute& c) {
  const int64_t bytes = c.row_bytes;
  if (bytes == 0) return;
  char* const y = static_cast<char*>(c.y);
  const auto copy = c.rows * bytes >= STREAMED ? copy_past_caches : copy_bytes;
  split_evenly(c.tokens, 1, c.tokens * c.choices * bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t j = 0; j < c.choices; ++j) {
        const int64_t row = c.row_of[t * c.choices + j];
        if (row >= 0) copy(y + row * bytes, static_cast<const char*>(c.x) + t * bytes, bytes);
      }
    finish_stores();
  });
  int64_t empty = 0;
  for (int64_t row = 0; row < c.rows; ++row) empty += c.source[row] < 0;
  split_evenly(c.rows, 1, empty * bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (c.source[row] < 0) memset(y + row * bytes, 0, size_t(bytes));
  });
}

void unpermute(const Unpermute& c) {
  split_evenly(c.tokens, 1, c.tokens * c.choices * c.dim, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(2 * c.dim);
    unpermute_rows(c, begin, end, scratch.data());
  });
}

void unpermute_backward(const UnpermuteBackward& c) {
  // Of dropped assignments, to which no row leads.
  const int64_t assignments = c.tokens * c.choices;
  if (assignments > 0) memset(c.grad_weights, 0, size_t(assignments) * (c.weight_dtype == F32 ? 4 : 2));
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(3 * c.dim);
    unpermute_backward_rows(c, begin, end, scratch.data());
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
