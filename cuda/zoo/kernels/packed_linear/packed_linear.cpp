// A linear layer on packed weights on the CPU. Compiled once for each instruction set.
//
// Few tokens: codes become numbers in registers, and blocks of rows are taken two at a time where one alone would leave
// the arithmetic waiting for itself. More tokens: a chunk of the columns of a block becomes numbers in the L1 cache,
// by which all tiles of tokens are multiplied; for many tokens four blocks at a time, so that x comes from memory once
// for them. The order of sums is the same.
#include "packed_linear.h"

#include "../common/parallel.h"
#include "codes.h"
#include "row_blocks.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int64_t MOST_TOKENS = 528;

// Where a chunk of columns ends: at most PIECE columns, whole groups or a piece of one.
template <class A>
int64_t end_of_chunk(const PackedWeight& w, int64_t k) {
  if (w.group <= A::PIECE) return lesser(k + A::PIECE / w.group * w.group, w.columns);
  return lesser(k + A::PIECE, (k / w.group + 1) * w.group);
}

// The tokens [first, first + count) of x, in tiles of about equal size, for few tokens one; the numbers lie
// [chunk][tile][k / STEP][token of the tile]. With minima the sums of x over each piece besides, [tile][piece][token].
template <class A>
class Tokens {
 public:
  typedef typename A::Number Number;

  Tokens(const PackedLinear& c, int64_t first, int64_t count)
      : c_(c),
        first_(first),
        count_(count),
        tiles_(count <= A::FEW ? 1 : ceil_div(count, A::TILE)),
        pieces_(c.w.groups() * ceil_div(c.w.group, A::PIECE)),
        numbers_(count * c.w.columns / A::STEP),
        sums_(c.w.minima == nullptr ? 0 : count * pieces_) {
    split_evenly(tiles_, 1, count * c.w.columns, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile)
        for (int64_t k = 0, stop; k < c.w.columns; k = stop) take(tile, k, stop = end_of_chunk<A>(c.w, k));
    });
  }

  int64_t tiles() const { return tiles_; }
  int64_t begin(int64_t tile) const { return count_ * tile / tiles_; }
  int tokens(int64_t tile) const { return int(begin(tile + 1) - begin(tile)); }
  // From a chunk [k, end) on. Where there is one tile, chunks follow each other.
  Number* numbers(int64_t tile, int64_t k, int64_t end) const {
    return numbers_.data() + (k * count_ + begin(tile) * (end - k)) / A::STEP;
  }
  float* sums(int64_t tile) const { return sums_.data() + begin(tile) * pieces_; }

 private:
  // The columns [k, end) of a tile, which are a chunk.
  void take(int64_t tile, int64_t k, int64_t end) const {
    with_tokens<A::TILE>(tokens(tile), [&](auto of) {
      constexpr int MT = decltype(of)::value;
      float wide[MT][A::PIECE];
      const char* rows[MT];
      for (int m = 0; m < MT; ++m) {
        const int64_t at = (first_ + begin(tile) + m) * c_.w.columns + k;
        rows[m] = static_cast<const char*>(c_.x) + at * (c_.dtype == F32 ? 4 : 2);
        const float* floats = reinterpret_cast<const float*>(rows[m]);
        if (c_.dtype != F32 && (A::WIDE || c_.w.minima != nullptr)) {
          widen(reinterpret_cast<const uint16_t*>(rows[m]), wide[m], c_.dtype, end - k);
          floats = wide[m];
          if (A::WIDE) rows[m] = reinterpret_cast<const char*>(floats);
        }
        if (c_.w.minima != nullptr) add_up(floats, k, end, sums(tile) + m, MT);
      }
      Number* const to = numbers(tile, k, end);
      for (int64_t i = 0; i < (end - k) / A::STEP; ++i)
#pragma GCC unroll 8
        for (int m = 0; m < MT; ++m) memcpy(&to[i * MT + m], rows[m] + i * int64_t(sizeof(Number)), sizeof(Number));
    });
  }

  // The sums of the pieces in [k, end); `row` begins at k.
  void add_up(const float* row, int64_t k, int64_t end, float* to, int64_t stride) const {
    const int64_t group = c_.w.group, pieces_of_group = ceil_div(group, A::PIECE);
    for (const int64_t begin = k; k < end;) {
      float* const sum = to + (k / group * pieces_of_group + k % group / A::PIECE) * stride;
      const int64_t stop = lesser(k + A::PIECE, (k / group + 1) * group);
      Vec lanes{};
      for (; k < stop; k += WIDTH) lanes = lanes + load<F32>(row, k - begin);  // groups are multiples of 16
      *sum = 0.0f;
      for (int i = 0; i < WIDTH; ++i) *sum += lanes[i];
    }
  }

  const PackedLinear& c_;
  int64_t first_, count_, tiles_, pieces_;
  Scratch<Number> numbers_;
  Scratch<float> sums_;
};

// What a tile of MT tokens and NB blocks are multiplied from.
template <class A>
struct Factors {
  const PackedWeight& w;
  const Block* blocks;
  const typename A::Weights* ready;  // the lines of columns [begin, end) as numbers; null: they are made from the codes
  const typename A::Number* x;       // from column `begin` on
  const float* sums;
};

// fn(token, block, vector of its rows), written out: indices that are known keep sums in registers.
template <int MT, int NB, class Fn>
ZOO_HD void each_sum(const Fn& fn) {
#pragma GCC unroll 16
  for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) fn(m, b, v);
}

// c += the columns [begin, end), which are whole pieces, for MT tokens and NB blocks; c is [token][NB · 32].
template <class A, int BITS, bool SYMMETRIC, bool READY, int MT, int NB>
void multiply(const Factors<A>& f, float* c, int64_t begin, int64_t end) {
  const int64_t group = f.w.group, pieces_of_group = ceil_div(group, A::PIECE);
  Vec total[MT][NB][VECTORS];
  each_sum<MT, NB>([&](int m, int b, int v) __attribute__((always_inline)) {
    total[m][b][v] = load<F32>(c, (m * NB + b) * ROWS + v * WIDTH);
  });
  const typename A::Number* x = f.x;
  for (int64_t k = begin; k < end;) {
    const int64_t g = k / group, stop = lesser(lesser(k + A::PIECE, (g + 1) * group), end);
    Vec acc[MT][NB][A::SUMS] = {};
    for (int64_t pair = k / 2; pair < stop / 2; ++pair, x += 2 / A::STEP * MT)
#pragma GCC unroll 2
      for (int b = 0; b < NB; ++b) {
        const auto add = [&](const typename A::Weights& w) __attribute__((always_inline)) {
#pragma GCC unroll 16
          for (int m = 0; m < MT; ++m) A::add(acc[m][b], w, x + m, MT);
        };
        if constexpr (READY) {
          add(f.ready[pair - begin / 2]);
        } else {
          const uint8_t* const line = f.blocks[b].lines + pair * (8 * BITS);
          __builtin_prefetch(line + 1024);
          add(A::template line<BITS, SYMMETRIC>(line));
        }
      }
    const float* const sums = f.sums + (g * pieces_of_group + (k - g * group) / A::PIECE) * MT;
    Vec found[MT][NB][VECTORS];
#pragma GCC unroll 16
    for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
      for (int b = 0; b < NB; ++b) A::template rows<BITS>(acc[m][b], found[m][b]);
#pragma GCC unroll 2
    for (int b = 0; b < NB; ++b)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const Vec scale = load<F32>(f.blocks[b].scales, g * ROWS + v * WIDTH);
        const auto add = [&](int m, Vec before) __attribute__((always_inline)) {
          total[m][b][v] = multiply_add(scale, found[m][b][v], before);
        };
        if (f.w.minima == nullptr) {
#pragma GCC unroll 16
          for (int m = 0; m < MT; ++m) add(m, total[m][b][v]);
        } else {
          const Vec low = load<F32>(f.blocks[b].minima, g * ROWS + v * WIDTH);
          const Vec zero = f.w.bits == 8 ? multiply_add(all_of(A::OFFSET), scale, low) : low;
#pragma GCC unroll 16
          for (int m = 0; m < MT; ++m) add(m, multiply_add(zero, all_of(sums[m]), total[m][b][v]));
        }
      }
    k = stop;
  }
  each_sum<MT, NB>([&](int m, int b, int v) __attribute__((always_inline)) {
    store<F32>(total[m][b][v], c, (m * NB + b) * ROWS + v * WIDTH);
  });
}

// Few tokens: the blocks [begin, end), two at a time for up to three tokens.
template <class A, int BITS, bool SYMMETRIC>
void by_registers(const PackedLinear& c, const Tokens<A>& tokens, const Rest& rest, int64_t first, int64_t begin,
                  int64_t end) {
  with_tokens<A::FEW>(tokens.tokens(0), [&](auto of) {
    constexpr int MT = decltype(of)::value, NB = WIDTH == 16 && MT <= 3 ? 2 : 1;
    for (int64_t i = begin; i < end;) {
      const int64_t now = end - i >= NB ? NB : 1;
      Block blocks[NB];
      for (int64_t b = 0; b < now; ++b) blocks[b] = block_of(c.w, rest, i + b);
      alignas(64) float sums[MT * NB * ROWS] = {};
      const Factors<A> factors{c.w, blocks, nullptr, tokens.numbers(0, 0, 0), tokens.sums(0)};
      if (now == NB) multiply<A, BITS, SYMMETRIC, false, MT, NB>(factors, sums, 0, c.w.columns);
      else multiply<A, BITS, SYMMETRIC, false, MT, 1>(factors, sums, 0, c.w.columns);
      for (int64_t b = 0; b < now; ++b) write(c, sums + b * ROWS, now * ROWS, blocks[b], first, MT);
      i += now;
    }
  });
}

// Many tokens: the blocks [begin, end).
template <class A, int BITS, bool SYMMETRIC>
void by_cache(const PackedLinear& c, const Tokens<A>& tokens, const Rest& rest, int64_t first, int64_t count,
              int64_t begin, int64_t end) {
  Scratch<typename A::Weights> ready(A::PIECE / 2);
  const int64_t together = count <= 64 ? 1 : 4;  // a chunk of few tokens stays in the L1 cache
  Scratch<float> sums(together * count * ROWS);
  for (int64_t i = begin; i < end; i += together) {
    const int64_t now = lesser(together, end - i);
    memset(sums.data(), 0, size_t(now * count * ROWS) * 4);
    for (int64_t k = 0, stop; k < c.w.columns; k = stop) {
      stop = end_of_chunk<A>(c.w, k);
      for (int64_t b = 0; b < now; ++b) {
        const Block block = block_of(c.w, rest, i + b);
        for (int64_t pair = k / 2; pair < stop / 2; ++pair) {
          const uint8_t* const line = block.lines + pair * (8 * BITS);
          __builtin_prefetch(line + 2048);
          ready.data()[pair - k / 2] = A::template line<BITS, SYMMETRIC>(line);
        }
        for (int64_t tile = 0; tile < tokens.tiles(); ++tile) {
          const Factors<A> factors{c.w, &block, ready.data(), tokens.numbers(tile, k, stop), tokens.sums(tile)};
          float* const to = sums.data() + (b * count + tokens.begin(tile)) * ROWS;
          with_tokens<A::TILE>(tokens.tokens(tile), [&](auto of) {
            multiply<A, BITS, SYMMETRIC, true, decltype(of)::value, 1>(factors, to, k, stop);
          });
        }
      }
    }
    for (int64_t b = 0; b < now; ++b)
      write(c, sums.data() + b * count * ROWS, ROWS, block_of(c.w, rest, i + b), first, count);
  }
}

template <class A, int BITS, bool SYMMETRIC>
void product(const PackedLinear& c) {
  const Rest rest(c.w);
  const int64_t parts = ceil_div(c.tokens, MOST_TOKENS);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = c.tokens * part / parts, count = c.tokens * (part + 1) / parts - first;
    const Tokens<A> tokens(c, first, count);
    const int64_t work = c.w.rows * c.w.columns * (1 + count / 8);
    split_evenly(ceil_div(c.w.rows, ROWS), 1, work, [&](int64_t begin, int64_t end) {
      if (count <= A::FEW) by_registers<A, BITS, SYMMETRIC>(c, tokens, rest, first, begin, end);
      else by_cache<A, BITS, SYMMETRIC>(c, tokens, rest, first, count, begin, end);
    });
  }
}

template <class A>
void with_codes(const PackedLinear& c) {
  const bool symmetric = c.w.minima == nullptr;
  const auto run = c.w.bits == 8 ? symmetric ? product<A, 8, true> : product<A, 8, false>
                   : symmetric   ? product<A, 4, true>
                                 : product<A, 4, false>;
  run(c);
}

// A block's columns [begin, end), as they are to be written: (columns, rows).
template <Dtype D, int BITS, bool SYMMETRIC>
void columns_of(const Block& block, const PackedWeight& w, void* out, int64_t stride, int64_t begin, int64_t end) {
  Vec keeps[2] = {};  // one k of each pair: the other becomes zero, which changes no sum
  for (int lane = 0; lane < WIDTH; ++lane) keeps[lane % 2][lane] = 1.0f;
  for (int64_t k = begin; k < end; k += 2) {
    const Floats::Weights line = Floats::line<BITS, SYMMETRIC>(block.lines + k / 2 * (8 * BITS));
    for (int i = 0; i < 2; ++i) {
      Vec kept[Floats::SUMS], rows[VECTORS];
      for (int v = 0; v < Floats::SUMS; ++v) kept[v] = line.at[v] * keeps[i];
      Floats::rows<BITS>(kept, rows);
      for (int v = 0; v < VECTORS && v * WIDTH < block.rows; ++v) {
        const int64_t at = k / w.group * ROWS + v * WIDTH, num = lesser(WIDTH, block.rows - v * WIDTH);
        const Vec scale = load<F32>(block.scales, at), low = SYMMETRIC ? Vec{} : load<F32>(block.minima, at);
        const Vec y = SYMMETRIC ? scale * rows[v] : scale * rows[v] + low;
        store<D>(y, out, (k + i - begin) * stride + v * WIDTH, num);
      }
    }
  }
}

bool has_pairs() {
#if defined(ZOO_HAS_PAIRS)
  return dots_bf16();
#else
  return false;
#endif
}

}  // namespace

void packed_linear(const PackedLinear& c) {
#if defined(ZOO_HAS_PAIRS)
  if (c.dtype == BF16 && has_pairs()) return with_codes<Pairs>(c);
#endif
  with_codes<Floats>(c);
}

void packed_columns(const PackedWeight& w, void* out, Dtype dtype, int64_t row, int64_t num_rows, int64_t begin,
                    int64_t count) {
  const Rest rest(w);
  split_evenly(ceil_div(num_rows, ROWS), 1, num_rows * count, [&](int64_t first, int64_t last) {
    with_dtype(dtype, [&](auto of) {
      constexpr Dtype D = decltype(of)::value;
      const auto run = w.minima == nullptr ? w.bits == 8 ? columns_of<D, 8, true> : columns_of<D, 4, true>
                       : w.bits == 8       ? columns_of<D, 8, false>
                                           : columns_of<D, 4, false>;
      for (int64_t i = first; i < last; ++i) {
        const Block block = block_of(w, rest, row / ROWS + i);
        char* const to = static_cast<char*>(out) + i * ROWS * (D == F32 ? 4 : 2);
        run(block, w, to, num_rows, begin, begin + count);
      }
    });
  });
}

void packed_most_tokens(Dtype dtype, int64_t& tokens) {
  // Without AVX-512 torch's product is the faster one once W is read more than a few times, and for bf16 wherever the
  // processor has neither dot products, or whole tiles of them.
  const bool fast = WIDTH == 16 && (dtype != BF16 || (has_pairs() && !multiplies_bf16_tiles()));
  tokens = fast ? INT64_MAX : PACKED_TOKENS;
}

}  // namespace ZOO_ISA
}  // namespace zoo
