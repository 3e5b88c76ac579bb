// exp and what is made of it, in fp32: one sequence of roundings, so the CPU, CUDA and reference (elementary.py) agree
// bit for bit, where the libraries of the three do not.
//
//   e^x = 2^n·e^r      n = round(x·log2 e), r = x - n·ln 2 (ln 2 in two parts, the first product exact), |r| <= 0.347
//   e^r = 1 + (r + r²·P(r)), P of degree 4, minimax: relative error 2^-28.3
//
// Errors: 2 units in the last place at most (r errs by 2^-25, the last two additions round by 2^-24 together with e^r
// between 0.707 and 1.415); results below 2^-126 are rounded once more, to the grid of subnormal numbers. Below -104:
// 0; above 88.72…: infinity; NaN stays NaN.
//
//   Q(a) = 1 - Φ(a) for a >= 0:   e^(-a²/2)·t·R(t), t = 1/(1 + 0.35·a), R of degree 8, minimax on [0, 15]: 2^-24.9
//
// Φ is the normal distribution function. Error of Q relative to Q: (a²/2 + 12)·2^-24, since a² is rounded.
#pragma once

#if defined(__CUDACC__)
#include "numbers.h"
#else
#include "vectors.h"
#endif

namespace zoo {
inline namespace ZOO_ISA {

// x between low and high; a NaN stays one.
ZOO_HD float clamped(float x, float low, float high) {
  const float raised = x < low ? low : x;
  return raised > high ? high : raised;
}

// e·2^n, rounded once, of e near 1; shifted = n + 1.5·2^23, so that n is in its low bits.
ZOO_HD float times_power_of_two(float e, float shifted) {
  const int32_t i = int32_t(bits_of_float(shifted)) - 0x4B400000;
  // Two factors: 2^n itself may be no normal number.
  const int32_t half = i >> 1;
  const float first = float_of_bits(uint32_t(half + 127) << 23), second = float_of_bits(uint32_t(i - half + 127) << 23);
  return (e * first) * second;
}

#if !defined(__CUDACC__)

ZOO_HD Vec clamped(Vec x, float low, float high) { return less_of(spread(high), greater_of(spread(low), x)); }

ZOO_HD Vec times_power_of_two(Vec e, Vec shifted) {
#if defined(__AVX512BW__)
  return Vec(_mm512_scalef_ps(__m512(e), __m512(shifted - 12582912.0f)));
#else
  const IntVec i = same_bits<IntVec>(shifted) - 0x4B400000, half = i >> 1;
  return (e * same_bits<Vec>((half + 127) << 23)) * same_bits<Vec>((i - half + 127) << 23);
#endif
}

#endif

// T here and below: float, or a vector of it.
template <class T>
ZOO_HD T exp_of(T x) {
  const T y = clamped(x, -104.0f, 89.0f);
  const T shifted = y * 1.44269502f + 12582912.0f;
  const T n = shifted - 12582912.0f;
  const T r = (y - n * 0.693359375f) + n * 0.000212194440f;
  T p = T{} + 0.001381455804221332f;
  p = p * r + 0.008368736132979393f;
  p = p * r + 0.04166838899254799f;
  p = p * r + 0.1666652113199234f;
  p = p * r + 0.4999999403953552f;
  return times_power_of_two(1.0f + (r + (r * r) * p), shifted);
}

template <class T>
ZOO_HD T sigmoid_of(T x) {
  return 1.0f / (1.0f + exp_of(-x));
}

// Q(a); `density` gets e^(-a²/2).
template <class T>
ZOO_HD T normal_tail(T a, T& density) {
  const T t = 1.0f / (1.0f + 0.35f * a);
  T p = T{} - 0.02916399948298931f;
  p = p * t + 0.1440611481666565f;
  p = p * t + -0.25590258836746216f;
  p = p * t + 0.15939374268054962f;
  p = p * t + -0.02326440066099167f;
  p = p * t + 0.10557503998279572f;
  p = p * t + 0.11981543898582458f;
  p = p * t + 0.13986434042453766f;
  p = p * t + 0.13962125778198242f;
  density = exp_of(-0.5f * (a * a));
  return density * (p * t);
}

}  // namespace ZOO_ISA
}  // namespace zoo
