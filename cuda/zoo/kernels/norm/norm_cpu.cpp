#include "norm_cpu.h"

#include <vector>

#include "../common/parallel.h"

namespace zoo {

void scale_norm_cpu(const NormRow* rows, int64_t num_rows, Dtype dtype, float factor, double* sums) {
  struct Part {
    int64_t row, begin, end;
  };
  std::vector<Part> parts;
  int64_t total = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    total += rows[i].n;
    for (int64_t at = 0; at < rows[i].n; at += NORM_PART)
      parts.push_back({i, at, at + NORM_PART < rows[i].n ? at + NORM_PART : rows[i].n});
  }
  std::vector<double> partial(parts.size());
  split_evenly(int64_t(parts.size()), 1, total, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Part& part = parts[size_t(i)];
      partial[size_t(i)] = ZOO_DISPATCH(scale_norm_part, rows[part.row], dtype, factor, part.begin, part.end);
    }
  });
  for (int64_t i = 0; i < num_rows; ++i) sums[i] = 0;
  for (size_t i = 0; i < parts.size(); ++i) sums[parts[i].row] += partial[i];
}

}  // namespace zoo
