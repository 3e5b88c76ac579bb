// The norm on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/squares.h"
#include "norm.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

double sum_of_part(const NormRow& row, Dtype dtype, float factor, int64_t begin, int64_t end) {
  alignas(64) float buffer[BLOCK];
  alignas(64) double lanes[SHORT_LANES] = {};
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    float* x = fp32_block(row.x, dtype, at, n, buffer);
    if (factor != 1.0f) {
      for (int64_t i = 0; i < n; ++i) x[i] = factor * x[i];
      write_block(x, row.x, dtype, at, n);
      x = fp32_block(row.x, dtype, at, n, buffer);  // as stored: rounding may have made an infinity
    }
    add_squares(x, n, lanes);
  }
  return sum_of(lanes);
}

}  // namespace

void scale_norm(const NormRow* rows, int64_t num_rows, Dtype dtype, float factor, double* parts, double* sums) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_rows; ++i) total += rows[i].n;
  const int64_t count = square_parts(rows, num_rows);
  split_evenly(count, 1, total, [&](int64_t first, int64_t last) {
    each_square_part(rows, num_rows, first, last, [&](int64_t row, int64_t begin, int64_t end, int64_t part) {
      parts[part] = sum_of_part(rows[row], dtype, factor, begin, end);
    });
  });
  for (int64_t i = 0; i < num_rows; ++i) sums[i] = 0;
  each_square_part(rows, num_rows, 0, count,
                   [&](int64_t row, int64_t, int64_t, int64_t part) { sums[row] += parts[part]; });
}

}  // namespace ZOO_ISA
}  // namespace zoo
