#include "onebit_cpu.h"

#include "../common/parallel.h"

namespace zoo {

void onebit_compress_cpu(const void* x, Dtype dtype, float* error, uint8_t* bits, float* scales, int64_t n,
                         int64_t group) {
  split_evenly((n + group - 1) / group, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      scales[i] = ZOO_DISPATCH(onebit_compress_group, x, dtype, error, bits, i * group, count);
    }
  });
}

void onebit_decompress_cpu(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                           int64_t group) {
  split_evenly((n + group - 1) / group, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      ZOO_DISPATCH(onebit_decompress_group, out, dtype, bits, scales[i], add, i * group, count);
    }
  });
}

}  // namespace zoo
