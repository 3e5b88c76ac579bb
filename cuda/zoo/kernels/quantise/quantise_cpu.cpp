#include "quantise_cpu.h"

#include "../common/parallel.h"

namespace zoo {

void quantise_cpu(const void* x, Dtype dtype, int bits, int8_t* q, float* scales, int64_t n, int64_t group,
                  Swizzle swizzle) {
  split_evenly((n + group - 1) / group, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group, to = swizzle.place(i);
      scales[to] = ZOO_DISPATCH(quantise_group, x, dtype, bits, q + to * group * bits / 8, i * group, count);
    }
  });
}

void dequantise_cpu(void* out, Dtype dtype, int bits, const int8_t* q, const float* scales, int64_t ranks, float factor,
                    int64_t n, int64_t group) {
  const int64_t groups = (n + group - 1) / group, stride = (n * bits + 7) / 8;
  split_evenly(groups, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      ZOO_DISPATCH(dequantise_group, out, dtype, bits, q, stride, scales + i, groups, ranks, factor, i * group, count);
    }
  });
}

}  // namespace zoo
