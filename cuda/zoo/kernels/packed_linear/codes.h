// Codes in packed order as numbers, on CPUs: a line is 32 rows at two k, the two k of a row beside each other.
//
// With Floats a number is fp32: a vector of numbers has some rows at both k and is multiplied by the two k of x in
// turns, so that even and odd k are added up apart, and together once a piece ends. With Pairs, the bf16 dot products
// of AVX-512, a vector has pairs of bf16; see packed_linear.h.
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

// WIDTH codes of 8 bits, or bytes of two codes of 4 bits, as numbers of 32 bits.
template <bool SIGNED>
ZOO_HD IntVec words_of(const uint8_t* from) {
#if defined(__AVX512BW__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return IntVec(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return IntVec(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  IntVec words;
  for (int i = 0; i < WIDTH; ++i) words[i] = SIGNED ? int32_t(int8_t(from[i])) : int32_t(from[i]);
  return words;
#endif
}

// The lower (i = 0) or upper codes of bytes of 4 bits as fp32. Bytes were widened by words_of<SYMMETRIC>.
template <bool SYMMETRIC>
ZOO_HD Vec halves_of(IntVec words, int i) {
#if defined(__AVX512BW__)
  static constexpr float table[2][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}};
  // An index into 16 numbers is the lower four bits.
  return Vec(_mm512_permutexvar_ps(i == 0 ? __m512i(words) : _mm512_srli_epi32(__m512i(words), 4),
                                   _mm512_loadu_ps(table[SYMMETRIC])));
#else
  if (i == 1) words = words >> 4;
  else words = SYMMETRIC ? (words << 28) >> 28 : words & (IntVec{} + 15);
  return __builtin_convertvector(words, Vec);
#endif
}

// Lane k: p[2k] + p[2k + 1], then those of q.
ZOO_HD Vec sums_of_pairs(Vec p, Vec q) {
#if defined(__AVX512BW__)
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
  return Vec(_mm512_permutex2var_ps(__m512(p), even, __m512(q))) +
         Vec(_mm512_permutex2var_ps(__m512(p), odd, __m512(q)));
#elif defined(__AVX2__)
  const __m256 sum =
      _mm256_add_ps(_mm256_shuffle_ps(__m256(p), __m256(q), 0x88), _mm256_shuffle_ps(__m256(p), __m256(q), 0xDD));
  return Vec(_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sum), 0xD8)));
#else
  return Vec{p[0] + p[1], p[2] + p[3], q[0] + q[1], q[2] + q[3]};
#endif
}

struct Floats {
  typedef uint64_t Number;  // of x: two k, as fp32
  static constexpr int SUMS = 2 * VECTORS;
  struct Weights {
    Vec at[SUMS];  // of a line
  };
  static constexpr bool WIDE = true;                  // a Number is made of fp32
  static constexpr int64_t STEP = 2;                  // how many k a Number has
  static constexpr int64_t PIECE = 128;               // 32 rows of it are half an L1 cache
  static constexpr int FEW = WIDTH == 16 ? 6 : 1;     // tokens for which codes become numbers each time
  static constexpr int TILE = WIDTH == 16 ? 7 : FEW;  // tokens of a tile beyond
  static constexpr float OFFSET = 0.0f;

  template <int BITS, bool SYMMETRIC>
  static ZOO_HD Weights line(const uint8_t* from) {
    Weights to;
    if constexpr (BITS == 8) {
      for (int v = 0; v < SUMS; ++v) to.at[v] = __builtin_convertvector(words_of<SYMMETRIC>(from + v * WIDTH), Vec);
    } else {
      for (int v = 0; v < VECTORS; ++v) {
        const IntVec words = words_of<SYMMETRIC>(from + v * WIDTH);
        to.at[v] = halves_of<SYMMETRIC>(words, 0);
        to.at[VECTORS + v] = halves_of<SYMMETRIC>(words, 1);
      }
    }
    return to;
  }

  // acc += line · the two k of x of one token.
  static ZOO_HD void add(Vec (&acc)[SUMS], const Weights& w, const uint64_t* x, int64_t) {
    Vec both;
#if defined(__AVX512BW__)
    both = Vec(_mm512_castsi512_ps(_mm512_set1_epi64(int64_t(*x))));
#elif defined(__AVX2__)
    both = Vec(_mm256_castsi256_ps(_mm256_set1_epi64x(int64_t(*x))));
#else
    for (int i = 0; i < 2; ++i) memcpy(reinterpret_cast<char*>(&both) + 8 * i, x, 8);
#endif
    for (int v = 0; v < SUMS; ++v) acc[v] = multiply_add(w.at[v], both, acc[v]);
  }

  // Sums of 32 rows, in their order.
  template <int BITS>
  static ZOO_HD void rows(const Vec (&acc)[SUMS], Vec (&to)[VECTORS]) {
    if constexpr (BITS == 4) {
      for (int v = 0; v < VECTORS; ++v) to[v] = sums_of_pairs(acc[2 * v], acc[2 * v + 1]);
    } else {
#if defined(__AVX512BW__)
      // A vector of codes has four rows of the lower half of the block, then four of the upper.
      const __m512 first = __m512(sums_of_pairs(acc[0], acc[1])), last = __m512(sums_of_pairs(acc[2], acc[3]));
      const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(4));
      to[0] = Vec(_mm512_permutex2var_ps(first, lower, last));
      to[1] = Vec(_mm512_permutex2var_ps(first, upper, last));
#else
      // Those of four rows of the lower half of the block and of four of the upper take turns.
      constexpr int EACH = 8 / WIDTH;  // vectors of four rows
      for (int v = 0; v < VECTORS; ++v) {
        const int half = v / (VECTORS / 2), first = v % (VECTORS / 2) * WIDTH / 4;  // of groups of four rows
        const int p = (2 * first + half) * EACH, q = EACH == 2 ? p + 1 : p + 2;
        to[v] = sums_of_pairs(acc[p], acc[q]);
      }
#endif
    }
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
  static constexpr int SUMS = VECTORS;
  static constexpr bool WIDE = false;
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

  template <int BITS>
  static ZOO_HD void rows(const Vec (&acc)[SUMS], Vec (&to)[VECTORS]) {
    for (int v = 0; v < VECTORS; ++v) to[v] = acc[v];
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
