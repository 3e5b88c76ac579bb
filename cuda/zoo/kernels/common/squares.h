// Sums of squares that are the same on every instruction set (CPU).
#pragma once

#include "numbers.h"

namespace zoo {
inline namespace ZOO_ISA {

constexpr int LANES = 16;

// Σx² in fp64: element i goes to lane i mod 16, whatever the vector width. Squares of fp32 are exact in fp64, and their
// sum cannot overflow, so it is finite if and only if every x is.
static inline void add_squares(const float* __restrict x, int64_t n, double* __restrict lanes) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int k = 0; k < LANES; ++k) lanes[k] += double(x[i + k]) * double(x[i + k]);
  for (int k = 0; i < n; ++i, ++k) lanes[k] += double(x[i]) * double(x[i]);
}

static inline double sum_of(const double* lanes) {
  double sum = 0;
  for (int k = 0; k < LANES; ++k) sum += lanes[k];
  return sum;
}

}  // namespace ZOO_ISA
}  // namespace zoo
