// What the CPU version of bias and GELU offers to the binding.
#pragma once

#include "../common/isa.h"
#include "bias_gelu.h"

namespace zoo {

// Rows [begin, end); `scratch`: 3·D floats, backward 4·D.
ZOO_DECLARE(void bias_gelu_rows(const BiasGelu& c, int64_t begin, int64_t end, float* scratch))
// The same backward for one part of rows; adds dx to part[0, D).
ZOO_DECLARE(void bias_gelu_backward_rows(const BiasGelu& c, int64_t begin, int64_t end, float* scratch, float* part))

void bias_gelu_cpu(const BiasGelu& c);
void bias_gelu_backward_cpu(const BiasGelu& c);

}  // namespace zoo
