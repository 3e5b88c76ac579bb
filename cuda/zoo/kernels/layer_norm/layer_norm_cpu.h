// What the CPU version of layer normalisation offers to the binding.
#pragma once

#include "../common/isa.h"
#include "layer_norm.h"

namespace zoo {

// Rows [begin, end). `scratch`: FORWARD_SCRATCH or BACKWARD_SCRATCH padded rows of floats.
ZOO_DECLARE(void layer_norm_rows(const LayerNorm& c, int64_t begin, int64_t end, float* scratch))
// The same backward for one part of rows; adds to parts dw and, a padded row further, db.
ZOO_DECLARE(void layer_norm_backward_rows(const LayerNormBackward& c, int64_t begin, int64_t end, float* scratch,
                                          float* parts))

// The floats from one row of scratch to the next, so that each begins at a multiple of 64 bytes.
static inline int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

constexpr int64_t FORWARD_SCRATCH = 3, BACKWARD_SCRATCH = 1;

void layer_norm_cpu(const LayerNorm& c);
void layer_norm_backward_cpu(const LayerNormBackward& c);

}  // namespace zoo
