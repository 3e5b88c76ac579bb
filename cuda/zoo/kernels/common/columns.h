// The second half of a column sum on the CPU: the sums of the parts become one (lanes.h has the order).
#pragma once

#include "isa.h"
#include "numbers.h"

namespace zoo {

// to[i] = Σ_p parts[p·stride + i], in the order of p, rounded to `dtype`, for begin <= i < end.
ZOO_DECLARE(void sum_parts(const float* parts, int64_t num_parts, int64_t stride, void* to, Dtype dtype, int64_t begin,
                           int64_t end))

// The same for i < n, on all threads.
void sum_parts_cpu(const float* parts, int64_t num_parts, int64_t stride, void* to, Dtype dtype, int64_t n);

}  // namespace zoo
