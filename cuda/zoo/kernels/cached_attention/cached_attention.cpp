// Attention over a cache on the CPU. Compiled once for each instruction set.
#include "cached_attention.h"

#include "../common/blocks.h"
#include "../common/dots.h"
#include "../common/elementary.h"
#include "../common/parallel.h"
#include "../common/scratch.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int TOGETHER = 4;                 // keys, or vectors of y
constexpr int64_t WIDE = TOGETHER * WIDTH;  // numbers of y at a time

template <Dtype D>
struct Query {
  const CachedAttention& c;
  const char *keys, *values;  // of the row and the group
  const int32_t* indices;     // null: 0, 1, ...
  int64_t count;              // of the keys that it sees

  const char* key(int64_t i) const { return keys + (indices == nullptr ? i : indices[i]) * c.of_keys.token * SIZE; }
  const char* value(int64_t i) const {
    return values + (indices == nullptr ? i : indices[i]) * c.of_values.token * SIZE;
  }

  static constexpr int64_t SIZE = D == F32 ? 4 : 2;
};

// scores[i] = scale · q·k_i for N keys from i on.
template <Dtype D, int N>
void dots(const Query<D>& of, const float* q, int64_t i, float* scores) {
  const int64_t dim = of.c.dim;
  const char* keys[N];
  for (int m = 0; m < N; ++m) keys[m] = of.key(i + m);
  Vec acc[N][PARTS] = {};
  const auto step = [&](int64_t d, int64_t numbers) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; ++p) {
      const int64_t at = d + p * WIDTH, left = numbers - p * WIDTH, count = left < WIDTH ? left : WIDTH;
      if (count <= 0) return;
      const Vec x = load<F32>(q, at, count);
#pragma GCC unroll 4
      for (int m = 0; m < N; ++m) acc[m][p] = fused(load<D>(keys[m], at, count), x, acc[m][p]);
    }
  };
  int64_t d = 0;
  for (; d + DOT_LANES <= dim; d += DOT_LANES) step(d, DOT_LANES);
  if (d < dim) step(d, dim - d);
  Four four[N];
  for (int m = 0; m < N; ++m) four[m] = folded(acc[m]);
  fold_all(four, N, scores + i);
  for (int m = 0; m < N; ++m) scores[i + m] *= of.c.scale;
}

// scores become e; returns 1/S.
float exponentials(float* scores, int64_t count) {
  const float most = lane_maximum(count, [&](int64_t i) { return scores[i]; });
  LaneVectors sums = {};
  each_lane_vector(count, [&](int64_t i, int k, int64_t num) {
    const Vec e = first_of(exp_of(load<F32>(scores, i, num) - most), num);
    store<F32>(e, scores, i, num);
    sums.at[k] += e;
  });
  return 1.0f / sums.sum();
}

// N vectors of y from number d on, the last one of `count` numbers.
template <Dtype D, int N>
ZOO_HD void sum(const Query<D>& of, const float* e, float factor, int64_t d, int64_t count, void* y, int64_t at) {
  Vec acc[N] = {};
  for (int64_t i = 0; i < of.count; ++i) {
    const char* const value = of.value(i);
    const Vec weight = spread(e[i]);
#pragma GCC unroll 4
    for (int p = 0; p < N; ++p) acc[p] = fused(weight, load<D>(value, d + p * WIDTH, count), acc[p]);
  }
  for (int p = 0; p < N; ++p) store<D>(acc[p] * factor, y, at + d + p * WIDTH, count);
}

template <Dtype D>
void attend(const Query<D>& of, const float* q, float* scores, void* y, int64_t at) {
  const int64_t dim = of.c.dim;
  int64_t i = 0;
  for (; i + TOGETHER <= of.count; i += TOGETHER) dots<D, TOGETHER>(of, q, i, scores);
  for (; i < of.count; ++i) dots<D, 1>(of, q, i, scores);
  const float factor = of.count == 0 ? 0.0f : exponentials(scores, of.count);
  int64_t d = 0;
  for (; d + WIDE <= dim; d += WIDE) sum<D, TOGETHER>(of, scores, factor, d, WIDTH, y, at);
  for (; d + WIDTH <= dim; d += WIDTH) sum<D, 1>(of, scores, factor, d, WIDTH, y, at);
  if (d < dim) sum<D, 1>(of, scores, factor, d, dim - d, y, at);
}

// The heads of group g for token t of row b.
template <Dtype D>
void heads(const CachedAttention& c, int64_t b, int64_t g, int64_t t, float* q, float* scores, int32_t* indices) {
  constexpr int64_t SIZE = Query<D>::SIZE;
  const int64_t each = c.heads / c.groups, seen = c.length - c.tokens + t + 1;
  int64_t count = seen < 0 ? 0 : seen;
  if (c.mask != nullptr) {
    const bool* const mask = c.mask + b * c.mask_row + t * c.mask_token;
    count = 0;
    for (int64_t j = 0; j < c.length; ++j) {
      indices[count] = int32_t(j);
      count += mask[j * c.mask_key] ? 1 : 0;
    }
  }
  const Query<D> of{c, static_cast<const char*>(c.keys) + (b * c.of_keys.row + g * c.of_keys.head) * SIZE,
                    static_cast<const char*>(c.values) + (b * c.of_values.row + g * c.of_values.head) * SIZE,
                    c.mask == nullptr ? nullptr : indices, count};
  for (int64_t h = g * each; h < (g + 1) * each; ++h) {
    const int64_t from = b * c.of_q.row + h * c.of_q.head + t * c.of_q.token;
    if constexpr (D == F32) memcpy(q, static_cast<const float*>(c.q) + from, size_t(c.dim) * 4);
    else widen(static_cast<const uint16_t*>(c.q) + from, q, D, c.dim);
    attend<D>(of, q, scores, c.y, ((b * c.tokens + t) * c.heads + h) * c.dim);
  }
}

}  // namespace

void cached_attention(const CachedAttention& c) {
  const int64_t units = c.batch * c.groups * c.tokens;
  split_evenly(units, 1, c.batch * c.heads * c.tokens * c.length * c.dim, [&](int64_t begin, int64_t end) {
    const Scratch<float> q(c.dim), scores(c.length + DOT_LANES);
    const Scratch<int32_t> indices(c.mask == nullptr ? 0 : c.length + 1);
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t of_row = c.groups * c.tokens, b = i / of_row, g = i % of_row / c.tokens, t = i % c.tokens;
        heads<decltype(of)::value>(c, b, g, t, q.data(), scores.data(), indices.data());
      }
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
