// Column sums on the CPU (lanes.h has the order): rows in parts of 64, then the sums of the parts.
#pragma once

#include "blocks.h"
#include "lanes.h"
#include "parallel.h"

namespace zoo {
inline namespace ZOO_ISA {

// fn(begin, end, part): the rows of each part of [first, last), and where its `width` sums go, which are 0 before.
template <class Fn>
static inline void each_part(int64_t rows, int64_t first, int64_t last, float* parts, int64_t width, const Fn& fn) {
  for (int64_t p = first; p < last; ++p) {
    float* part = parts + p * width;
    for (int64_t i = 0; i < width; ++i) part[i] = 0;
    const int64_t begin = p * PART_ROWS, end = begin + PART_ROWS;
    fn(begin, end < rows ? end : rows, part);
  }
}

// to[i] = Σ_p parts[p·width + i], in the order of p, rounded to `dtype`, for i < n; on all threads.
static inline void sum_parts(const float* parts, int64_t num_parts, int64_t width, void* to, Dtype dtype, int64_t n) {
  split_evenly(n, 64, n * num_parts, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
      const int64_t m = end - at < BLOCK ? end - at : BLOCK;
      for (int64_t i = 0; i < m; ++i) sums[i] = 0;
      for (int64_t p = 0; p < num_parts; ++p) {
        const float* part = parts + p * width + at;
        for (int64_t i = 0; i < m; ++i) sums[i] += part[i];
      }
      narrow(sums, to, dtype, at, m);
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
