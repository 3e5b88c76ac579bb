#include "softmax_cpu.h"

#include <vector>

#include "../common/parallel.h"

namespace zoo {

void softmax_cpu(const Softmax& c) {
  split_evenly(c.rows, 1, c.rows * c.keys, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(3 * c.keys));
    ZOO_DISPATCH(softmax_rows, c, begin, end, scratch.data());
  });
}

void softmax_backward_cpu(const SoftmaxBackward& c) {
  split_evenly(c.rows, 1, c.rows * c.keys, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(3 * c.keys));
    ZOO_DISPATCH(softmax_backward_rows, c, begin, end, scratch.data());
  });
}

}  // namespace zoo
