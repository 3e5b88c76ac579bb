#include "bias_gelu_cpu.h"

#include <vector>

#include "../common/columns.h"
#include "../common/lanes.h"
#include "../common/parallel.h"

namespace zoo {

void bias_gelu_cpu(const BiasGelu& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(3 * c.dim));
    ZOO_DISPATCH(bias_gelu_rows, c, begin, end, scratch.data());
  });
}

void bias_gelu_backward_cpu(const BiasGelu& c) {
  const int64_t parts = num_parts(c.rows);
  std::vector<float> sums(size_t(parts * c.dim));
  split_evenly(parts, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(4 * c.dim));
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * PART_ROWS, last = first + PART_ROWS < c.rows ? first + PART_ROWS : c.rows;
      ZOO_DISPATCH(bias_gelu_backward_rows, c, first, last, scratch.data(), sums.data() + p * c.dim);
    }
  });
  sum_parts_cpu(sums.data(), parts, c.dim, c.grad_bias, c.bias_dtype, c.dim);
}

}  // namespace zoo
