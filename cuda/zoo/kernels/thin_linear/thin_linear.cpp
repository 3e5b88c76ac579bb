// Batch-invariant linear layers on the CPU. Compiled once for each instruction set.
//
// A tile is some tokens by some rows of W, so many that their sums fill the registers: more than one sum hides how long
// a multiply-add takes, and each number that is loaded serves several. Rows are taken in chunks; the first tile of
// tokens brings a chunk from memory and asks for what comes next, the other tiles find it in the cache. Where there are
// several tiles, a chunk of 16 bits is widened once for all of them.
#include "thin_linear.h"

#include "../common/blocks.h"
#include "../common/dots.h"
#include "../common/parallel.h"
#include "../common/scratch.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int64_t CHUNK = 48;                               // rows
constexpr int TILE = WIDTH == 16 ? 4 : WIDTH == 8 ? 3 : 1;  // tokens

// Rows of a tile of so many tokens.
constexpr int rows_of(int tokens) {
  if (WIDTH == 16) return tokens <= 3 ? 8 : 6;
  if (WIDTH == 8) return tokens == 1 ? 6 : tokens == 2 ? 3 : 2;
  return 2;
}

// sums[t · CHUNK + r] for T tokens, whose x are fp32, and R rows that begin at w; ask: the R rows after them are
// wanted.
template <Dtype D, int T, int R, bool ASK>
void tile(const float* x, const char* w, int64_t columns, float* sums) {
  Vec acc[R][T][PARTS] = {};
  const auto step = [&](int64_t k, int64_t count) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; ++p) {
      const int64_t at = k + p * WIDTH, left = count - p * WIDTH, num = left < WIDTH ? left : WIDTH;
      if (num <= 0) return;
      Vec from[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) from[t] = load<F32>(x, t * columns + at, num);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        if (ASK && p == 0) ask_for<D>(w, (r + R) * columns + at);
        const Vec row = load<D>(w, r * columns + at, num);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) acc[r][t][p] = fused(row, from[t], acc[r][t][p]);
      }
    }
  };
  int64_t k = 0;
  for (; k + DOT_LANES <= columns; k += DOT_LANES) step(k, DOT_LANES);
  if (k < columns) step(k, columns - k);
  Four four[R];
  for (int t = 0; t < T; ++t) {
    for (int r = 0; r < R; ++r) four[r] = folded(acc[r][t]);
    fold_all(four, R, sums + t * CHUNK);
  }
}

// The rows [0, rows) of a chunk.
template <Dtype D, int T, bool ASK>
void tiles(const float* x, const char* w, int64_t columns, int64_t rows, float* sums) {
  constexpr int R = rows_of(T);
  constexpr int64_t SIZE = D == F32 ? 4 : 2;
  int64_t r = 0;
  for (; r + R <= rows; r += R) tile<D, T, R, ASK>(x, w + r * columns * SIZE, columns, sums + r);
  for (; r < rows; ++r) tile<D, T, 1, ASK>(x, w + r * columns * SIZE, columns, sums + r);
}

// y of some tokens from `token` on and the rows [row, row + rows).
template <Dtype D>
void write(const ThinLinear& c, const float* sums, const float* bias, int64_t token, int tokens, int64_t row,
           int64_t rows) {
  for (int t = 0; t < tokens; ++t)
    each_vector(rows, [&](int64_t r, int64_t count) __attribute__((always_inline)) {
      Vec y = load<F32>(sums, t * CHUNK + r, count);
      if (bias != nullptr) y = y + load<F32>(bias, r, count);
      store<D>(y, c.y, (token + t) * c.stride + row + r, count);
    });
}

template <Dtype D>
void product(const ThinLinear& c) {
  constexpr int64_t SIZE = D == F32 ? 4 : 2;
  Scratch<float> wide(D == F32 ? 0 : c.tokens * c.columns);
  const float* x = static_cast<const float*>(c.x);
  if constexpr (D != F32) {
    widen(static_cast<const uint16_t*>(c.x), wide.data(), D, c.tokens * c.columns);
    x = wide.data();
  }
  const int64_t num_tiles = ceil_div(c.tokens, TILE);
  const bool widens = D != F32 && num_tiles > 2;
  split_evenly(c.rows, 1, c.rows * c.columns * (1 + c.tokens / 8), [&](int64_t first, int64_t last) {
    alignas(64) float sums[TILE * CHUNK], bias[CHUNK];
    Scratch<float> chunk(widens ? CHUNK * c.columns : 0);
    for (int64_t row = first; row < last; row += CHUNK) {
      const int64_t rows = last - row < CHUNK ? last - row : CHUNK;
      if (c.bias != nullptr) {
        if (c.bias_dtype == F32) memcpy(bias, static_cast<const float*>(c.bias) + row, size_t(rows) * 4);
        else widen(static_cast<const uint16_t*>(c.bias) + row, bias, c.bias_dtype, rows);
      }
      const char* const w = static_cast<const char*>(c.w) + row * c.columns * SIZE;
      if (widens) widen(reinterpret_cast<const uint16_t*>(w), chunk.data(), D, rows * c.columns);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t token = c.tokens * i / num_tiles, end = c.tokens * (i + 1) / num_tiles;
        with_tokens<TILE>(int(end - token), [&](auto of) {
          constexpr int T = decltype(of)::value;
          const float* const from = x + token * c.columns;
          if (widens) tiles<F32, T, false>(from, reinterpret_cast<char*>(chunk.data()), c.columns, rows, sums);
          else if (i == 0) tiles<D, T, true>(from, w, c.columns, rows, sums);
          else tiles<D, T, false>(from, w, c.columns, rows, sums);
        });
        write<D>(c, sums, c.bias == nullptr ? nullptr : bias, token, int(end - token), row, rows);
      }
    }
  });
}

}  // namespace

void thin_linear(const ThinLinear& c) {
  with_dtype(c.dtype, [&](auto of) { product<decltype(of)::value>(c); });
}

}  // namespace ZOO_ISA
}  // namespace zoo
