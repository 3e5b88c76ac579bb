#include "activation_cpu.h"

#include "../common/parallel.h"

namespace zoo {

void activation_cpu(const Activation& c) {
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) { ZOO_DISPATCH(activation_rows, c, begin, end); });
}

void activation_backward_cpu(const Activation& c) {
  split_evenly(c.rows, 1, c.rows * c.dim,
               [&](int64_t begin, int64_t end) { ZOO_DISPATCH(activation_backward_rows, c, begin, end); });
}

}  // namespace zoo
