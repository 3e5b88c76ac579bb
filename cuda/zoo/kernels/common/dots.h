// Dot products of fp32 on CPUs, whose bits the instruction set does not change: product k goes into lane k mod 16 by a
// fused multiply-add, in the order of k; then the lanes are folded by halves, lane i += lane i + 8, 4, 2, 1.
#pragma once

#include "vectors.h"

namespace zoo {
inline namespace ZOO_ISA {

constexpr int DOT_LANES = 16;
constexpr int PARTS = DOT_LANES / WIDTH;  // vectors that have the lanes of a sum

// a·b + c, rounded once.
ZOO_HD Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512BW__)
  return Vec(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX2__)
  return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
  for (int k = 0; k < WIDTH; ++k) c[k] = __builtin_fmaf(a[k], b[k], c[k]);
  return c;
#endif
}

typedef float Four __attribute__((vector_size(16)));

// The lanes of a sum, folded to four.
ZOO_HD Four folded(const Vec (&sum)[PARTS]) {
  alignas(64) float lanes[DOT_LANES];
  memcpy(lanes, sum, sizeof(lanes));
  Four quarter[4];
  memcpy(quarter, lanes, sizeof(lanes));
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

ZOO_HD float folded(Four x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// to[i] = folded(from[i])
ZOO_HD void fold_all(const Four* from, int count, float* to) {
  int i = 0;
#if defined(__SSE2__)
  for (; i + 4 <= count; i += 4) {
    const __m128 a = __m128(from[i]), b = __m128(from[i + 1]), c = __m128(from[i + 2]), d = __m128(from[i + 3]);
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(to + i, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
  }
#endif
  for (; i < count; ++i) to[i] = folded(from[i]);
}

// fn(std::integral_constant<int, tokens>) for 1 to MOST tokens.
template <int MOST, class Fn>
static inline void with_tokens(int tokens, const Fn& fn) {
  if constexpr (MOST > 1)
    if (tokens < MOST) return with_tokens<MOST - 1>(tokens, fn);
  fn(std::integral_constant<int, MOST>());
}

}  // namespace ZOO_ISA
}  // namespace zoo
