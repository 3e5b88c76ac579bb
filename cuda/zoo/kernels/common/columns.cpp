#include "columns.h"

#include "parallel.h"

namespace zoo {

void sum_parts_cpu(const float* parts, int64_t num_parts, int64_t stride, void* to, Dtype dtype, int64_t n) {
  split_evenly(n, 64, n * num_parts, [&](int64_t begin, int64_t end) {
    ZOO_DISPATCH(sum_parts, parts, num_parts, stride, to, dtype, begin, end);
  });
}

}  // namespace zoo
