#include "layer_norm_cpu.h"

#include "../common/columns.h"
#include "../common/lanes.h"
#include "../common/parallel.h"
#include "../common/scratch.h"

namespace zoo {

void layer_norm_cpu(const LayerNorm& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    Scratch scratch(FORWARD_SCRATCH * padded(c.dim));
    ZOO_DISPATCH(layer_norm_rows, c, begin, end, scratch.data());
  });
}

void layer_norm_backward_cpu(const LayerNormBackward& c) {
  const int64_t parts = num_parts(c.rows), stride = 2 * padded(c.dim);
  Scratch sums(parts * stride);
  split_evenly(parts, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    Scratch scratch(BACKWARD_SCRATCH * padded(c.dim));
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * PART_ROWS, last = first + PART_ROWS < c.rows ? first + PART_ROWS : c.rows;
      ZOO_DISPATCH(layer_norm_backward_rows, c, first, last, scratch.data(), sums.data() + p * stride);
    }
  });
  sum_parts_cpu(sums.data(), parts, stride, c.grad_weight, c.weight_dtype, c.dim);
  sum_parts_cpu(sums.data() + padded(c.dim), parts, stride, c.grad_bias, c.weight_dtype, c.dim);
}

}  // namespace zoo
