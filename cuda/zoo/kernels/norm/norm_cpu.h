// What the CPU version of the norm offers to the binding.
#pragma once

#include "../common/isa.h"
#include "norm.h"

namespace zoo {

ZOO_DECLARE(double scale_norm_part(const NormRow& row, Dtype dtype, float factor, int64_t begin, int64_t end))

void scale_norm_cpu(const NormRow* rows, int64_t num_rows, Dtype dtype, float factor, double* sums);

}  // namespace zoo
