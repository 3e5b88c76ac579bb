// Packed weights times x in 8 bits on the CPU. Compiled once for each instruction set.
//
// Two lines of codes, four k, become vectors of 32 bits a row, with its four codes as unsigned bytes: where codes have
// a sign they are made too large by 128 (4 bits: 8), and sums begin at -128·X. A step multiplies those by four p.
#include "int8_activations.h"

#include "../common/dots.h"
#include "../common/parallel.h"
#include "row_blocks.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int VECTORS = int(ROWS) / WIDTH;                  // of 32 rows
constexpr int TILE = WIDTH == 16 ? 6 : WIDTH == 8 ? 2 : 1;  // tokens that codes are read for at a time
constexpr int pair_of_blocks(int tokens) { return WIDTH == 16 && tokens <= 2 ? 2 : 1; }

template <int BITS, bool SYMMETRIC>
constexpr int offset_of_codes() {
  return SYMMETRIC ? 1 << (BITS - 1) : 0;
}

// Codes of four k: vector v has rows v·WIDTH, ...; but for 4 bits on AVX2, see in_order.
struct Codes {
  IntVec at[VECTORS];
};

#if defined(__AVX512BW__)

template <int BITS, bool SYMMETRIC>
ZOO_HD Codes codes_of(const uint8_t* lines) {
  if constexpr (BITS == 8) {
    const __m512i sign = _mm512_set1_epi8(SYMMETRIC ? char(0x80) : 0);
    const __m512i first = _mm512_xor_si512(_mm512_loadu_si512(lines), sign);
    const __m512i second = _mm512_xor_si512(_mm512_loadu_si512(lines + 64), sign);
    return {{IntVec(_mm512_unpacklo_epi16(first, second)), IntVec(_mm512_unpackhi_epi16(first, second))}};
  } else {
    alignas(64) static constexpr uint16_t turns[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i sign = _mm512_set1_epi8(SYMMETRIC ? char(0x88) : 0), half = _mm512_set1_epi8(15);
    const __m512i both =
        _mm512_xor_si512(_mm512_permutexvar_epi16(_mm512_load_si512(turns), _mm512_loadu_si512(lines)), sign);
    return {{IntVec(_mm512_and_si512(both, half)), IntVec(_mm512_and_si512(_mm512_srli_epi16(both, 4), half))}};
  }
}

#elif defined(__AVX2__)

template <int BITS, bool SYMMETRIC>
ZOO_HD Codes codes_of(const uint8_t* lines) {
  const auto load_at = [lines](int at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + at)); };
  Codes to;
  if constexpr (BITS == 8) {
    const __m256i sign = _mm256_set1_epi8(SYMMETRIC ? char(0x80) : 0);
    for (int i = 0; i < 2; ++i) {
      const __m256i first = _mm256_xor_si256(load_at(32 * i), sign);
      const __m256i second = _mm256_xor_si256(load_at(64 + 32 * i), sign);
      to.at[i] = IntVec(_mm256_unpacklo_epi16(first, second)),
      to.at[2 + i] = IntVec(_mm256_unpackhi_epi16(first, second));
    }
  } else {
    const __m256i sign = _mm256_set1_epi8(SYMMETRIC ? char(0x88) : 0), half = _mm256_set1_epi8(15);
    const __m256i first = _mm256_xor_si256(load_at(0), sign), second = _mm256_xor_si256(load_at(32), sign);
    const __m256i both[2] = {_mm256_unpacklo_epi16(first, second), _mm256_unpackhi_epi16(first, second)};
    for (int i = 0; i < 2; ++i) {
      to.at[i] = IntVec(_mm256_and_si256(both[i], half));
      to.at[2 + i] = IntVec(_mm256_and_si256(_mm256_srli_epi16(both[i], 4), half));
    }
  }
  return to;
}

#else

template <int BITS, bool SYMMETRIC>
ZOO_HD Codes codes_of(const uint8_t* lines) {
  Codes to;
#if defined(__SSE2__)
  const auto load_at = [lines](int at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(lines + at)); };
  constexpr int HALF = VECTORS / 2;
  if constexpr (BITS == 8) {
    const __m128i sign = _mm_set1_epi8(SYMMETRIC ? char(0x80) : 0);
    for (int l = 0; l < HALF; ++l) {
      const __m128i first = _mm_xor_si128(load_at(16 * l), sign), second = _mm_xor_si128(load_at(64 + 16 * l), sign);
      to.at[l] = IntVec(_mm_unpacklo_epi16(first, second)), to.at[HALF + l] = IntVec(_mm_unpackhi_epi16(first, second));
    }
  } else {
    const __m128i sign = _mm_set1_epi8(SYMMETRIC ? char(0x88) : 0), half = _mm_set1_epi8(15);
    for (int l = 0; l < HALF; ++l) {
      const __m128i first = _mm_xor_si128(load_at(l / 2 * 16), sign);
      const __m128i second = _mm_xor_si128(load_at(32 + l / 2 * 16), sign);
      const __m128i both = l % 2 == 0 ? _mm_unpacklo_epi16(first, second) : _mm_unpackhi_epi16(first, second);
      to.at[l] = IntVec(_mm_and_si128(both, half));
      to.at[HALF + l] = IntVec(_mm_and_si128(_mm_srli_epi16(both, 4), half));
    }
  }
#else
  for (int row = 0; row < int(ROWS); ++row) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t byte = lines[i / 2 * (8 * BITS) + place_in_line(BITS, row, i % 2)];
      const uint32_t code = BITS == 8 ? byte : byte >> (row / 16 * 4) & 15;
      word |= (code ^ uint32_t(offset_of_codes<BITS, SYMMETRIC>())) << (8 * i);
    }
    to.at[row / WIDTH][row % WIDTH] = int32_t(word);
  }
#endif
  return to;
}

#endif

// Sums of 32 rows, as codes_of leaves them, in their order.
template <int BITS>
ZOO_HD void in_order(IntVec (&sums)[VECTORS]) {
#if defined(__AVX2__) && !defined(__AVX512BW__)
  if constexpr (BITS == 4)  // a vector has rows 0 to 3 and 8 to 11, the next 4 to 7 and 12 to 15
    for (int v = 0; v < VECTORS; v += 2) {
      const __m256i a = __m256i(sums[v]), b = __m256i(sums[v + 1]);
      sums[v] = IntVec(_mm256_permute2x128_si256(a, b, 0x20)),
      sums[v + 1] = IntVec(_mm256_permute2x128_si256(a, b, 0x31));
    }
#else
  (void)sums;
#endif
}

// sum + Σ of four codes times four p, in each 32 bits.
struct Words {
  template <int BITS>
  static ZOO_HD void add(IntVec& sum, IntVec codes, IntVec p) {
#if defined(__AVX512BW__)
    const __m512i u = __m512i(codes), x = __m512i(p);
    if constexpr (BITS == 4) {  // 2·15·127 has room in 16 bits
      sum += IntVec(_mm512_madd_epi16(_mm512_maddubs_epi16(u, x), _mm512_set1_epi16(1)));
    } else {
      const __m512i even = _mm512_and_si512(u, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(u, 8);
      sum += IntVec(_mm512_madd_epi16(even, _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8)));
      sum += IntVec(_mm512_madd_epi16(odd, _mm512_srai_epi16(x, 8)));
    }
#elif defined(__AVX2__)
    const __m256i u = __m256i(codes), x = __m256i(p);
    if constexpr (BITS == 4) {
      sum += IntVec(_mm256_madd_epi16(_mm256_maddubs_epi16(u, x), _mm256_set1_epi16(1)));
    } else {
      const __m256i even = _mm256_and_si256(u, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(u, 8);
      sum += IntVec(_mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8)));
      sum += IntVec(_mm256_madd_epi16(odd, _mm256_srai_epi16(x, 8)));
    }
#elif defined(__SSE2__)
    const __m128i u = __m128i(codes), x = __m128i(p);
    const __m128i even = _mm_and_si128(u, _mm_set1_epi16(255)), odd = _mm_srli_epi16(u, 8);
    sum += IntVec(_mm_madd_epi16(even, _mm_srai_epi16(_mm_slli_epi16(x, 8), 8)));
    sum += IntVec(_mm_madd_epi16(odd, _mm_srai_epi16(x, 8)));
#else
    for (int shift = 0; shift < 32; shift += 8)
      sum += (codes >> shift & (IntVec{} + 255)) * ((p << (24 - shift)) >> 24);
#endif
  }
};

#if defined(__AVX512BW__) && defined(ZOO_X86)
#define ZOO_HAS_VNNI 1

// The instruction of AVX-512 VNNI is written out, as those of codes.h are.
struct Vnni {
  template <int BITS>
  static ZOO_HD void add(IntVec& sum, IntVec codes, IntVec p) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(p));
  }
};

#endif

// p, d, X and z of the tokens [begin, end).
void take(const PackedLinear& c, const Int8Activations& x, int64_t begin, int64_t end) {
  const PackedWeight& w = c.w;
  const int64_t of_group = Int8Activations::blocks_of_group(w), blocks = Int8Activations::blocks(w);
  with_dtype(c.dtype, [&](auto of) {
    constexpr Dtype D = decltype(of)::value;
    for (int64_t m = begin; m < end; ++m)
      for (int64_t g = 0; g < w.groups(); ++g) {
        float z = 0.0f;
        for (int64_t b = 0; b < of_group; ++b) {
          const int64_t first = b * ACTIVATION_BLOCK, at = m * w.columns + g * w.group + first;
          const int count = int(lesser(ACTIVATION_BLOCK, w.group - first));
          alignas(64) float numbers[ACTIVATION_BLOCK];
          for (int i = 0; i < count; i += WIDTH) store<F32>(load<D>(c.x, at + i), numbers, i);
          const float d = quantise_block(count, x.codes + at, [&numbers](int i) { return numbers[i]; });
          int32_t sum = 0;
          for (int i = 0; i < count; ++i) sum += x.codes[at + i];
          x.scales[m * blocks + g * of_group + b] = d, x.sums[m * blocks + g * of_group + b] = sum;
          z += d * float(sum);
        }
        if (w.minima != nullptr) x.group_sums[m * w.groups() + g] = z;
      }
  });
}

// fn(token, block of rows, vector of its rows), written out: indices that are known keep sums in registers.
template <int MT, int NB, class Fn>
ZOO_HD void each_sum(const Fn& fn) {
#pragma GCC unroll 8
  for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
    for (int n = 0; n < NB; ++n)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) fn(m, n, v);
}

// y of MT tokens and NB blocks of rows without the bias, as [token][NB · 32].
template <class A, int BITS, bool SYMMETRIC, int MT, int NB>
void multiply(const PackedWeight& w, const Int8Activations& x, int64_t token, const Block* rows, float* y) {
  constexpr int OFFSET = offset_of_codes<BITS, SYMMETRIC>();
  const int64_t of_group = Int8Activations::blocks_of_group(w), blocks = Int8Activations::blocks(w);
  const int8_t* const p = x.codes + token * w.columns;
  const float* const scales = x.scales + token * blocks;
  const int32_t* const sums = x.sums + token * blocks;
  Vec total[MT][NB][VECTORS] = {};
  for (int64_t g = 0, k = 0, block = 0; g < w.groups(); ++g) {
    Vec part[MT][NB][VECTORS] = {};
    for (int64_t b = 0; b < of_group; ++b, ++block) {
      IntVec sum[MT][NB][VECTORS];
      each_sum<MT, NB>([&](int m, int n, int v) __attribute__((always_inline)) {
        sum[m][n][v] = IntVec{} - OFFSET * sums[m * blocks + block];
      });
      for (const int64_t stop = lesser(k + ACTIVATION_BLOCK, (g + 1) * w.group); k < stop; k += 4)
#pragma GCC unroll 2
        for (int n = 0; n < NB; ++n) {
          const uint8_t* const lines = rows[n].lines + k / 2 * (8 * BITS);
          __builtin_prefetch(lines + 1024);
          if (BITS == 8) __builtin_prefetch(lines + 1088);
          const Codes codes = codes_of<BITS, SYMMETRIC>(lines);
#pragma GCC unroll 8
          for (int m = 0; m < MT; ++m) {
            int32_t four;
            memcpy(&four, p + m * w.columns + k, 4);
            const IntVec all = IntVec{} + four;
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) A::template add<BITS>(sum[m][n][v], codes.at[v], all);
          }
        }
#pragma GCC unroll 8
      for (int m = 0; m < MT; ++m)
#pragma GCC unroll 2
        for (int n = 0; n < NB; ++n) in_order<BITS>(sum[m][n]);
      each_sum<MT, NB>([&](int m, int n, int v) __attribute__((always_inline)) {
        part[m][n][v] = part[m][n][v] + spread(scales[m * blocks + block]) * __builtin_convertvector(sum[m][n][v], Vec);
      });
    }
    each_sum<MT, NB>([&](int m, int n, int v) __attribute__((always_inline)) {
      Vec& to = total[m][n][v];
      to = to + load<F32>(rows[n].scales, g * ROWS + v * WIDTH) * part[m][n][v];
      if (!SYMMETRIC)
        to = to + load<F32>(rows[n].minima, g * ROWS + v * WIDTH) * spread(x.group_sums[(token + m) * w.groups() + g]);
    });
  }
  each_sum<MT, NB>([&](int m, int n, int v) __attribute__((always_inline)) {
    store<F32>(total[m][n][v], y, (m * NB + n) * ROWS + v * WIDTH);
  });
}

// The blocks [begin, end) of rows, for all tokens.
template <class A, int BITS, bool SYMMETRIC>
void product(const PackedLinear& c, const Int8Activations& x, const Rest& rest, int64_t begin, int64_t end) {
  const int64_t tiles = ceil_div(c.tokens, TILE), together = pair_of_blocks(int(ceil_div(c.tokens, tiles)));
  for (int64_t i = begin; i < end;) {
    const int64_t now = end - i >= together ? together : 1;
    Block rows[2];
    for (int64_t n = 0; n < now; ++n) rows[n] = block_of(c.w, rest, i + n);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t token = c.tokens * tile / tiles, count = c.tokens * (tile + 1) / tiles - token;
      with_tokens<TILE>(int(count), [&](auto of) {
        constexpr int MT = decltype(of)::value, NB = pair_of_blocks(MT);
        alignas(64) float y[MT * NB * ROWS];
        if (now == NB) {
          multiply<A, BITS, SYMMETRIC, MT, NB>(c.w, x, token, rows, y);
          for (int64_t n = 0; n < NB; ++n) write(c, y + n * ROWS, NB * ROWS, rows[n], token, MT);
        } else {
          for (int64_t n = 0; n < now; ++n) {
            multiply<A, BITS, SYMMETRIC, MT, 1>(c.w, x, token, rows + n, y);
            write(c, y, ROWS, rows[n], token, MT);
          }
        }
      });
    }
    i += now;
  }
}

template <class A>
void with_codes(const PackedLinear& c, const Int8Activations& x) {
  const Rest rest(c.w);
  const bool symmetric = c.w.minima == nullptr;
  const auto run = c.w.bits == 8 ? symmetric ? product<A, 8, true> : product<A, 8, false>
                   : symmetric   ? product<A, 4, true>
                                 : product<A, 4, false>;
  const int64_t work = c.w.rows * c.w.columns * (1 + c.tokens / 8);
  split_evenly(ceil_div(c.w.rows, ROWS), 1, work, [&](int64_t begin, int64_t end) { run(c, x, rest, begin, end); });
}

}  // namespace

void packed_linear_int8(const PackedLinear& c, const Int8Activations& x) {
  if (c.tokens == 0) return;
  split_evenly(c.tokens, 1, c.tokens * c.w.columns, [&](int64_t begin, int64_t end) { take(c, x, begin, end); });
#if defined(ZOO_HAS_VNNI)
  if (dots_int8()) return with_codes<Vnni>(c, x);
#endif
  with_codes<Words>(c, x);
}

}  // namespace ZOO_ISA
}  // namespace zoo
