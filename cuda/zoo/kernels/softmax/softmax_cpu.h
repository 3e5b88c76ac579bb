// What the CPU version of softmax offers to the binding.
#pragma once

#include "../common/isa.h"
#include "softmax.h"

namespace zoo {

// Rows [begin, end); `scratch`: 3·K floats.
ZOO_DECLARE(void softmax_rows(const Softmax& c, int64_t begin, int64_t end, float* scratch))
ZOO_DECLARE(void softmax_backward_rows(const SoftmaxBackward& c, int64_t begin, int64_t end, float* scratch))

void softmax_cpu(const Softmax& c);
void softmax_backward_cpu(const SoftmaxBackward& c);

}  // namespace zoo
