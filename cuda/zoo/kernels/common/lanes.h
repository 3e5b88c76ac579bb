// Sums in an order that depends on the count alone: not on the instruction set, the threads, or CPU against CUDA.
//
// Along a row (lane sum): element i is added to lane i mod 64, in the order of i; then the lanes are folded by halves,
// lane k += lane k + 32, 16, 8, 4, 2, 1. A warp of CUDA holds two lanes a thread. Of n terms no partial sum is longer
// than ⌈n/64⌉ + 6 additions, so |error| ≤ (⌈n/64⌉ + 6)·u·Σ|term|, u = 2^-24 (Higham 2002, section 4.2).
//
// Over rows (column sum): rows are cut into parts of 64; a part is added up in order from zero, then the parts are.
//
// Of what is flat (squares.h, groups): parts of SQUARES_PART elements, each in 16 lanes that are added in order.
#pragma once

#include "numbers.h"

namespace zoo {

constexpr int LANES = 64;
constexpr int64_t PART_ROWS = 64;
constexpr int SHORT_LANES = 16;
constexpr int64_t SQUARES_PART = 65536;

inline namespace ZOO_ISA {

ZOO_HD int64_t num_parts(int64_t rows) { return ceil_div(rows, PART_ROWS); }

struct alignas(64) Lanes {
  float at[LANES];
};

// Adds value(0), ..., value(n - 1).
template <class Fn>
static inline __attribute__((always_inline)) void add_to_lanes(Lanes& lanes, int64_t n, const Fn& value) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int k = 0; k < LANES; ++k) lanes.at[k] += value(i + k);
  for (int k = 0; i < n; ++i, ++k) lanes.at[k] += value(i);
}

static inline __attribute__((always_inline)) float fold(Lanes& lanes) {
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes.at[k] += lanes.at[k + half];
  return lanes.at[0];
}

// A NaN wins, whichever side it is on.
ZOO_HD float larger(float a, float b) { return ((b > a) | (b != b)) ? b : a; }

// The greatest of value(0), ..., value(n - 1), -∞ of none. The order does not matter to it; lanes let it be vectorised.
template <class Fn>
static inline __attribute__((always_inline)) float lane_maximum(int64_t n, const Fn& value) {
  Lanes lanes;
  for (int k = 0; k < LANES; ++k) lanes.at[k] = -__builtin_huge_valf();
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int k = 0; k < LANES; ++k) lanes.at[k] = larger(lanes.at[k], value(i + k));
  for (int k = 0; i < n; ++i, ++k) lanes.at[k] = larger(lanes.at[k], value(i));
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes.at[k] = larger(lanes.at[k], lanes.at[k + half]);
  return lanes.at[0];
}

template <class Fn>
static inline __attribute__((always_inline)) float lane_sum(int64_t n, const Fn& value) {
  Lanes lanes = {};
  add_to_lanes(lanes, n, value);
  return fold(lanes);
}

}  // namespace ZOO_ISA
}  // namespace zoo
