// Rotary positions and the cache on the CPU. Compiled once for each instruction set.
#include "rotary_cache.h"

#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vectors.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// Element `at` of `from` on, rotated, to element `to_at` of `to` on.
template <Dtype D>
void rotate(const RotaryCache& c, const float* cos, const float* sin, const void* from, int64_t at, void* to,
            int64_t to_at) {
  const int64_t half = c.rotary / 2;
  if (c.interleaved) {
    for (int64_t i = 0; i < c.rotary; i += 2) {
      const float a = load<D>(from, at + i, 1)[0], b = load<D>(from, at + i + 1, 1)[0];
      store<D>(spread(a * cos[i] - b * sin[i]), to, to_at + i, 1);
      store<D>(spread(b * cos[i + 1] + a * sin[i + 1]), to, to_at + i + 1, 1);
    }
  } else {
    each_vector(half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
      const Vec a = load<D>(from, at + i, count), b = load<D>(from, at + half + i, count);
      const Vec first = a * load<F32>(cos, i, count) - b * load<F32>(sin, i, count);
      const Vec second = b * load<F32>(cos, half + i, count) + a * load<F32>(sin, half + i, count);
      store<D>(first, to, to_at + i, count);
      store<D>(second, to, to_at + half + i, count);
    });
  }
  constexpr int64_t SIZE = D == F32 ? 4 : 2;
  if (to != from && c.rotary < c.dim)
    memcpy(static_cast<char*>(to) + (to_at + c.rotary) * SIZE, static_cast<const char*>(from) + (at + c.rotary) * SIZE,
           size_t((c.dim - c.rotary) * SIZE));
}

template <Dtype D>
void token(const RotaryCache& c, int64_t b, int64_t t, float* tables) {
  constexpr int64_t SIZE = D == F32 ? 4 : 2;
  const int64_t table = (b * c.table_step + t) * c.rotary, first = (b * c.tokens + t) * c.width();
  const float* const cos = fp32_block(c.cos, c.table_dtype, table, c.rotary, tables);
  const float* const sin = fp32_block(c.sin, c.table_dtype, table, c.rotary, tables + c.rotary);
  for (int64_t h = 0; h < c.q_heads; ++h) rotate<D>(c, cos, sin, c.qkv, first + h * c.dim, c.qkv, first + h * c.dim);
  const int64_t place = !c.cached ? 0 : c.places[b * c.place_step + t];
  for (int64_t g = 0; g < c.kv_heads; ++g) {
    const int64_t k = first + (c.q_heads + g) * c.dim, v = k + c.kv_heads * c.dim;
    if (!c.cached) {
      rotate<D>(c, cos, sin, c.qkv, k, c.qkv, k);
      continue;
    }
    if (place < 0 || place >= c.room) continue;
    const int64_t to = ((b * c.kv_heads + g) * c.room + place) * c.dim;
    rotate<D>(c, cos, sin, c.qkv, k, c.keys, to);
    memcpy(static_cast<char*>(c.values) + to * SIZE, static_cast<const char*>(c.qkv) + v * SIZE, size_t(c.dim * SIZE));
  }
}

}  // namespace

void rotary_cache(const RotaryCache& c) {
  split_evenly(c.batch * c.tokens, 1, c.batch * c.tokens * c.width(), [&](int64_t begin, int64_t end) {
    const Scratch<float> tables(2 * c.rotary);
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t i = begin; i < end; ++i) token<decltype(of)::value>(c, i / c.tokens, i % c.tokens, tables.data());
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
