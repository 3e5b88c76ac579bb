#include "columns.h"

#include "blocks.h"

namespace zoo {
namespace ZOO_ISA {

void sum_parts(const float* parts, int64_t num_parts, int64_t stride, void* to, Dtype dtype, int64_t begin,
               int64_t end) {
  alignas(64) float sums[BLOCK];
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0;
    for (int64_t p = 0; p < num_parts; ++p) {
      const float* part = parts + p * stride + at;
      for (int64_t i = 0; i < n; ++i) sums[i] += part[i];
    }
    narrow(sums, to, dtype, at, n);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
