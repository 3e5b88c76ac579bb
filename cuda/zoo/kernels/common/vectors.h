// Vectors of fp32 on CPUs, as long as a register: +, -, *, / and comparisons are the compiler's, loads from and stores
// to memory of the three formats are here.
//
// Loops over blocks of fp32 (blocks.h) are simpler and mostly as fast. Vectors pay where memory is bf16 or fp16 and
// little is computed, since nothing goes through a buffer, and for lane sums, whose lanes stay in registers.
#pragma once

#include <type_traits>

#include "lanes.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zoo {
inline namespace ZOO_ISA {

#if defined(__AVX512BW__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));

// All elements equal.
ZOO_HD Vec spread(float x) { return Vec{} + x; }

template <class To, class From>
ZOO_HD To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The greater of each two; where one is NaN, or both are zeros, that of b.
ZOO_HD Vec greater_of(Vec a, Vec b) {
#if defined(__AVX512BW__)
  return Vec(_mm512_max_ps(__m512(a), __m512(b)));
#elif defined(__AVX2__)
  return Vec(_mm256_max_ps(__m256(a), __m256(b)));
#else
  return a > b ? a : b;
#endif
}

ZOO_HD Vec less_of(Vec a, Vec b) {
#if defined(__AVX512BW__)
  return Vec(_mm512_min_ps(__m512(a), __m512(b)));
#elif defined(__AVX2__)
  return Vec(_mm256_min_ps(__m256(a), __m256(b)));
#else
  return a < b ? a : b;
#endif
}

ZOO_HD Vec root_of(Vec x) {
#if defined(__AVX512BW__)
  return Vec(_mm512_sqrt_ps(__m512(x)));
#elif defined(__AVX2__)
  return Vec(_mm256_sqrt_ps(__m256(x)));
#elif defined(__SSE2__)
  return Vec(_mm_sqrt_ps(__m128(x)));
#else
  for (int k = 0; k < WIDTH; ++k) x[k] = __builtin_sqrtf(x[k]);
  return x;
#endif
}

// WIDTH numbers of bf16 or fp16; numbers.h has what widening and narrowing do.
typedef uint16_t HalfVec __attribute__((vector_size(2 * WIDTH)));

template <Dtype D>
ZOO_HD Vec widened(HalfVec bits) {
#if defined(__AVX512BW__)
  if constexpr (D == F16) return Vec(_mm512_cvtph_ps(__m256i(bits)));
  else return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(bits)), 16)));
#elif defined(__AVX2__)
  if constexpr (D == F16) return Vec(_mm256_cvtph_ps(__m128i(bits)));
  else return Vec(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(__m128i(bits)), 16)));
#else
  Vec x;
  for (int k = 0; k < WIDTH; ++k) x[k] = D == F16 ? f16_to_float(bits[k]) : bf16_to_float(bits[k]);
  return x;
#endif
}

template <Dtype D>
ZOO_HD HalfVec narrowed(Vec x) {
#if defined(__AVX512BW__)
  if constexpr (D == F16) return HalfVec(_mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT));
  const __m512i u = _mm512_castps_si512(__m512(x)), half = _mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF));
  const __mmask16 odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000));
  const __m512i sum = _mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
  const __mmask16 numbers = _mm512_cmp_ps_mask(__m512(x), __m512(x), _CMP_ORD_Q);
  return HalfVec(_mm512_mask_cvtepi32_epi16(_mm256_set1_epi16(0x7FC0), numbers, _mm512_srli_epi32(sum, 16)));
#elif defined(__AVX2__)
  if constexpr (D == F16) return HalfVec(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
  const __m256i u = _mm256_castps_si256(__m256(x));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i nans = _mm256_castps_si256(_mm256_cmp_ps(__m256(x), __m256(x), _CMP_UNORD_Q));
  const __m256i bits = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7FC0), nans);
  return HalfVec(_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xD8)));
#else
  HalfVec bits;
  for (int k = 0; k < WIDTH; ++k) bits[k] = D == F16 ? float_to_f16(x[k]) : float_to_bf16(x[k]);
  return bits;
#endif
}

// The elements [i, i + count) of memory of a format, zeros beyond; count <= WIDTH.
template <Dtype D>
ZOO_HD Vec load(const void* memory, int64_t i, int64_t count = WIDTH) {
  std::conditional_t<D == F32, Vec, HalfVec> x{};
  constexpr size_t size = sizeof(x) / WIDTH;
  memcpy(&x, static_cast<const char*>(memory) + i * int64_t(size), count == WIDTH ? sizeof(x) : size_t(count) * size);
  if constexpr (D == F32) return x;
  else return widened<D>(x);
}

// Returns x as it is read back.
template <Dtype D>
ZOO_HD Vec store(Vec x, void* memory, int64_t i, int64_t count = WIDTH) {
  const auto from = [x] {
    if constexpr (D == F32) return x;
    else return narrowed<D>(x);
  }();
  constexpr size_t size = sizeof(from) / WIDTH;
  memcpy(static_cast<char*>(memory) + i * int64_t(size), &from, count == WIDTH ? sizeof(from) : size_t(count) * size);
  if constexpr (D == F32) return x;
  else return widened<D>(from);
}

// The first `count` elements of x, `rest` beyond.
ZOO_HD Vec first_of(Vec x, int64_t count, float rest = 0.0f) {
  if (count == WIDTH) return x;
  Vec y = spread(rest);
  memcpy(&y, &x, size_t(count) * 4);
  return y;
}

// fn(i, count) for the vectors of [0, n). Where count is WIDTH, the compiler knows it, if fn is inlined.
template <class Fn>
ZOO_HD void each_vector(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + WIDTH <= n; i += WIDTH) fn(i, int64_t(WIDTH));
  if (i < n) fn(i, n - i);
}

// The lanes of a lane sum (lanes.h), or of a maximum.
constexpr int LANE_VECTORS = LANES / WIDTH;

struct LaneVectors {
  Vec at[LANE_VECTORS];

  ZOO_HD float sum() const {
    Lanes lanes;
    memcpy(lanes.at, at, sizeof(at));
    return fold(lanes);
  }

  // Of what is not NaN.
  ZOO_HD float maximum() const {
    Vec most = at[0];
    for (int k = 1; k < LANE_VECTORS; ++k) most = greater_of(at[k], most);
    float found = most[0];
    for (int k = 1; k < WIDTH; ++k) found = most[k] > found ? most[k] : found;
    return found;
  }
};

// The same with k, which vector of the lanes it is.
template <class Fn>
ZOO_HD void each_lane_vector(int64_t n, const Fn& fn) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
#pragma GCC unroll 16
    for (int k = 0; k < LANE_VECTORS; ++k) fn(i + k * WIDTH, k, int64_t(WIDTH));
#pragma GCC unroll 16
  for (int k = 0; k < LANE_VECTORS; ++k) {
    const int64_t at = i + k * WIDTH;
    if (at + WIDTH <= n) fn(at, k, int64_t(WIDTH));
    else if (at < n) fn(at, k, n - at);
  }
}

// Asks for the cache line of element i, to read or write it later: where a loop leaves memory idle that the next one
// waits for. An address that is not the process's does no harm.
template <Dtype D>
ZOO_HD void ask_for(const void* memory, int64_t i) {
  __builtin_prefetch(static_cast<const char*>(memory) + i * (D == F32 ? 4 : 2));
}

// fn(a constant of the format).
template <class Fn>
static inline void with_dtype(Dtype dtype, const Fn& fn) {
  if (dtype == F32) fn(std::integral_constant<Dtype, F32>());
  else if (dtype == BF16) fn(std::integral_constant<Dtype, BF16>());
  else fn(std::integral_constant<Dtype, F16>());
}

}  // namespace ZOO_ISA
}  // namespace zoo
