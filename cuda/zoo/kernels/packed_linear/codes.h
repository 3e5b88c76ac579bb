// Codes in packed order as numbers, on CPUs: a line is 32 rows at two k.
//
// With Floats a number is fp32 and a line becomes two times 32 of them, k by k. With Pairs, the bf16 dot products of
// AVX-512, it becomes 32 pairs of bf16; see packed_linear.h.
#pragma once

#include "../common/dots.h"
#include "packed_linear.h"

#if defined(__AVX512BW__) && defined(ZOO_X86)
#define ZOO_HAS_PAIRS 1
#endif

namespace zoo {
inline namespace ZOO_ISA {

constexpr int VECTORS = int(PACKED_ROWS) / WIDTH;  // of 32 rows

// All elements equal. spread() adds to zero, which no compiler may leave out.
ZOO_HD Vec all_of(float x) {
#if defined(__AVX512BW__)
  return Vec(_mm512_set1_ps(x));
#elif defined(__AVX2__)
  return Vec(_mm256_set1_ps(x));
#else
  return Vec{x, x, x, x};
#endif
}

// a·b + c: rounded once with AVX2 and AVX-512, else twice.
ZOO_HD Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX2__)
  return fused(a, b, c);
#else
  return a * b + c;
#endif
}

struct Line {
  Vec at[2][VECTORS];  // [k][rows]
};

// 8 bits: the two codes of WIDTH rows, from number v · WIDTH of the block on.
ZOO_HD HalfVec codes_of_rows(const uint8_t* line, int v) {
  HalfVec codes;
  const int row = v * WIDTH;
  for (int k = 0; k < WIDTH / 4; ++k)
    memcpy(reinterpret_cast<char*>(&codes) + 8 * k, line + place_in_line(8, row + 4 * k, 0), 8);
  return codes;
}

// Codes that begin at bit `from` of each number.
template <int BITS, bool SYMMETRIC>
ZOO_HD Vec numbers_of(IntVec words, int from) {
  if constexpr (SYMMETRIC) words = (words << (32 - BITS - from)) >> (32 - BITS);
  else words = (words >> from) & (IntVec{} + ((1 << BITS) - 1));
  return __builtin_convertvector(words, Vec);
}

struct Floats {
  typedef float Number;                                             // of x, one k
  typedef Line Weights;                                             // of a line
  static constexpr int64_t STEP = 1;                                // how many k a Number has
  static constexpr int64_t PIECE = 128;                             // 32 rows of it are half an L1 cache
  static constexpr int FEW = WIDTH == 16 ? 6 : WIDTH == 8 ? 2 : 1;  // tokens for which codes become numbers each time
  static constexpr int TILE = WIDTH == 16 ? 7 : FEW;                // tokens of a tile beyond
  static constexpr float OFFSET = 0.0f;

  template <int BITS, bool SYMMETRIC>
  static ZOO_HD Line line(const uint8_t* from) {
    Line to;
    HalfVec codes[VECTORS];
#if defined(__AVX512BW__)
    if constexpr (BITS == 8) {
      const __m512i halves = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
      const __m512i all = _mm512_permutexvar_epi64(halves, _mm512_loadu_si512(from));
      codes[0] = HalfVec(_mm512_castsi512_si256(all));
      codes[1] = HalfVec(_mm512_extracti64x4_epi64(all, 1));
    }
#elif defined(__AVX2__)
    if constexpr (BITS == 8)
      for (int v = 0; v < 2; ++v) {  // two quarters of the line: rows 8v, ..., 8v + 7, and 16 + 8v, ...
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + v);
        const __m256i apart = _mm256_permute4x64_epi64(both, 0xD8);
        codes[v] = HalfVec(_mm256_castsi256_si128(apart));
        codes[v + 2] = HalfVec(_mm256_extracti128_si256(apart, 1));
      }
#endif
    for (int v = 0; v < VECTORS; ++v) {
      const int row = v * WIDTH;
      if constexpr (BITS == 4) memcpy(&codes[v], from + place_in_line(4, row, 0), sizeof(HalfVec));
#if !defined(__AVX2__)
      else codes[v] = codes_of_rows(from, v);
#endif
      const IntVec words = __builtin_convertvector(codes[v], IntVec);
      const int first = BITS == 4 ? row / 16 * 4 : 0;
      for (int k = 0; k < 2; ++k) to.at[k][v] = numbers_of<BITS, SYMMETRIC>(words, first + 8 * k);
    }
    return to;
  }

  // acc += line · the two k of x of one token.
  static ZOO_HD void add(Vec (&acc)[VECTORS], const Line& w, const float* x, int64_t stride) {
    for (int k = 0; k < 2; ++k)
      for (int v = 0; v < VECTORS; ++v) acc[v] = multiply_add(w.at[k][v], all_of(x[k * stride]), acc[v]);
  }
};

#if defined(ZOO_HAS_PAIRS)

// The bf16 of 128 numbers of one sign, as their lower and their upper bytes: m, or m + 1/2.
struct ByteTables {
  alignas(64) uint8_t lower[128], upper[128];
};

constexpr ByteTables tables_of(bool halves) {
  ByteTables t{};
  for (int m = 0; m < 128; ++m) {
    const int twice = 2 * m + (halves ? 1 : 0);  // below 2^8, so all its bits find room
    int exponent = -1, bits = twice;
    if (twice == 0) continue;
    while (bits < 256) bits *= 2, ++exponent;  // twice = 1.f · 2^(8 - exponent - 1)
    const int value = (127 + 7 - exponent - 1) << 7 | ((bits >> 1) & 127);
    t.lower[m] = uint8_t(value & 255), t.upper[m] = uint8_t(value >> 8);
  }
  return t;
}

// The two instructions that AVX-512 BF16 and VBMI have are written out: given to the compiler as flags or attributes,
// it could use others of theirs where a processor without them comes by.
struct Pairs {
  typedef uint32_t Number;  // two k
  struct Weights {
    __m512i at[2];
  };
  static constexpr int64_t STEP = 2;
  static constexpr int64_t PIECE = 256;
  static constexpr int FEW = 6, TILE = 7;
  static constexpr float OFFSET = 127.5f;  // what unsigned codes of 8 bits are too small by

  template <int BITS, bool SYMMETRIC>
  static ZOO_HD Weights line(const uint8_t* from) {
    if constexpr (BITS == 4) {
      // A word's index into the table is five bits: the code, and a bit that does not matter.
      alignas(64) static constexpr uint16_t table[2][16] = {
          {0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150,
           0x4160, 0x4170},
          {0, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
           0xC000, 0xBF80}};
      const __m512i numbers =
          _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(table[SYMMETRIC])));
      const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
      return {
          {_mm512_permutexvar_epi16(words, numbers), _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), numbers)}};
    } else {
      // Symmetric: ±m. Else u - 127.5 = ±(m + 1/2), m = u - 128 or 127 - u: so 128 numbers are enough for u too.
      static constexpr ByteTables tables = tables_of(!SYMMETRIC);
      const __m512i codes = _mm512_loadu_si512(from), sign = _mm512_set1_epi8(char(0x80));
      const __m512i below = _mm512_movm_epi8(_mm512_testn_epi8_mask(codes, sign));                // u < 128
      const __m512i index = SYMMETRIC ? _mm512_abs_epi8(codes) : _mm512_xor_si512(codes, below);  // bit 7 is not asked
      const __m512i lower = found_in(tables.lower, index);
      __m512i upper = found_in(tables.upper, index);
      upper = _mm512_or_si512(upper, _mm512_and_si512(SYMMETRIC ? codes : below, sign));
      return {{_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)}};
    }
  }

  // acc += line · the two k of x of one token.
  static ZOO_HD void add(Vec (&acc)[VECTORS], const Weights& w, const uint32_t* x, int64_t) {
    const __m512i both = _mm512_set1_epi32(int32_t(*x));
    for (int v = 0; v < VECTORS; ++v) asm("vdpbf16ps %2, %1, %0" : "+v"(acc[v]) : "v"(w.at[v]), "v"(both));
  }

 private:
  static ZOO_HD __m512i found_in(const uint8_t* table, __m512i index) {
    asm("vpermi2b %2, %1, %0" : "+v"(index) : "v"(_mm512_load_si512(table)), "v"(_mm512_load_si512(table + 64)));
    return index;
  }
};

#endif

}  // namespace ZOO_ISA
}  // namespace zoo
