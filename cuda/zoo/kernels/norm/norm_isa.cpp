// The norm on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/squares.h"
#include "norm_cpu.h"

namespace zoo {
namespace ZOO_ISA {

double scale_norm_part(const NormRow& row, Dtype dtype, float factor, int64_t begin, int64_t end) {
  alignas(64) float buffer[BLOCK];
  alignas(64) double lanes[LANES] = {};
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

}  // namespace ZOO_ISA
}  // namespace zoo
