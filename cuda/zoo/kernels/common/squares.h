// Sums of squares that are the same on every instruction set (CPU).
#pragma once

#include "lanes.h"

namespace zoo {
inline namespace ZOO_ISA {

// Σx² in fp64: element i goes to lane i mod 16, whatever the vector width. Squares of fp32 are exact in fp64, and their
// sum cannot overflow, so it is finite if and only if every x is.
static inline void add_squares(const float* __restrict x, int64_t n, double* __restrict lanes) {
  int64_t i = 0;
  for (; i + SHORT_LANES <= n; i += SHORT_LANES)
    for (int k = 0; k < SHORT_LANES; ++k) lanes[k] += double(x[i + k]) * double(x[i + k]);
  for (int k = 0; i < n; ++i, ++k) lanes[k] += double(x[i]) * double(x[i]);
}

static inline double sum_of(const double* lanes) {
  double sum = 0;
  for (int k = 0; k < SHORT_LANES; ++k) sum += lanes[k];
  return sum;
}

// How many parts rows have, of which each is summed by itself.
template <class Row>
static inline int64_t square_parts(const Row* rows, int64_t num_rows) {
  int64_t parts = 0;
  for (int64_t i = 0; i < num_rows; ++i) parts += ceil_div(rows[i].n, SQUARES_PART);
  return parts;
}

// fn(row, begin, end, part) for the parts [first, last) of all rows: elements [begin, end) of a row.
template <class Row, class Fn>
static inline void each_square_part(const Row* rows, int64_t num_rows, int64_t first, int64_t last, const Fn& fn) {
  int64_t part = 0;
  for (int64_t i = 0; i < num_rows && part < last; ++i) {
    const int64_t end = part + ceil_div(rows[i].n, SQUARES_PART);
    for (int64_t p = part < first ? first : part; p < end && p < last; ++p) {
      const int64_t at = (p - part) * SQUARES_PART, rest = rows[i].n - at;
      fn(i, at, at + (rest < SQUARES_PART ? rest : SQUARES_PART), p);
    }
    part = end;
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
