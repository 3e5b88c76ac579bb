// What the CPU version of layer normalisation offers to the binding.
#pragma once

#include "../common/isa.h"
#include "layer_norm.h"

namespace zoo {

// Rows [begin, end). `scratch`: FORWARD_SCRATCH or BACKWARD_SCRATCH rows of floats.
ZOO_DECLARE(void layer_norm_rows(const LayerNorm& c, int64_t begin, int64_t end, float* scratch))
// The same backward for one part of rows; writes its sums of dw and of db to parts[0, D) and parts[D, 2·D).
ZOO_DECLARE(void layer_norm_backward_rows(const LayerNormBackward& c, int64_t begin, int64_t end, float* scratch,
                                          float* parts))

constexpr int64_t FORWARD_SCRATCH = 4, BACKWARD_SCRATCH = 5;

void layer_norm_cpu(const LayerNorm& c);
void layer_norm_backward_cpu(const LayerNormBackward& c);

}  // namespace zoo
