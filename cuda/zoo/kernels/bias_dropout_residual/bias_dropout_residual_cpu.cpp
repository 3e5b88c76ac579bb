#include "bias_dropout_residual_cpu.h"

#include <vector>

#include "../common/columns.h"
#include "../common/lanes.h"
#include "../common/parallel.h"

namespace zoo {
namespace {

// Ten rounds cost as much as several elements of the update do.
constexpr int64_t COST = 4;

struct Scratch {
  explicit Scratch(int64_t dim) : floats(size_t(DROPOUT_SCRATCH * dim)), words(size_t(dim + DROPOUT_MORE)) {}
  std::vector<float> floats;
  std::vector<uint32_t> words;
};

}  // namespace

void bias_dropout_cpu(const BiasDropout& c) {
  split_evenly(c.rows, 1, COST * c.rows * c.dim, [&](int64_t begin, int64_t end) {
    Scratch scratch(c.dim);
    ZOO_DISPATCH(bias_dropout_rows, c, begin, end, scratch.floats.data(), scratch.words.data());
  });
}

void bias_dropout_backward_cpu(const BiasDropout& c) {
  const int64_t parts = num_parts(c.rows);
  std::vector<float> sums(size_t(parts * c.dim));
  split_evenly(parts, 1, COST * c.rows * c.dim, [&](int64_t begin, int64_t end) {
    Scratch scratch(c.dim);
    for (int64_t p = begin; p < end; ++p) {
      const int64_t first = p * PART_ROWS, last = first + PART_ROWS < c.rows ? first + PART_ROWS : c.rows;
      ZOO_DISPATCH(bias_dropout_backward_rows, c, first, last, scratch.floats.data(), scratch.words.data(),
                   sums.data() + p * c.dim);
    }
  });
  sum_parts_cpu(sums.data(), parts, c.dim, c.grad_bias, c.bias_dtype, c.dim);
}

}  // namespace zoo
