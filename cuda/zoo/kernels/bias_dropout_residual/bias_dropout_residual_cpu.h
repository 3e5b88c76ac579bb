// What the CPU version of bias, dropout and residual offers to the binding.
#pragma once

#include "../common/isa.h"
#include "bias_dropout_residual.h"

namespace zoo {

// Rows [begin, end); `scratch`: DROPOUT_SCRATCH rows of floats, `words`: D + DROPOUT_MORE of them.
ZOO_DECLARE(void bias_dropout_rows(const BiasDropout& c, int64_t begin, int64_t end, float* scratch, uint32_t* words))
// The same backward for one part of rows; adds dx to part[0, D).
ZOO_DECLARE(void bias_dropout_backward_rows(const BiasDropout& c, int64_t begin, int64_t end, float* scratch,
                                            uint32_t* words, float* part))

constexpr int64_t DROPOUT_SCRATCH = 4;
constexpr int64_t DROPOUT_MORE = 128;  // words beyond a row: it begins and ends within groups that are made together

void bias_dropout_cpu(const BiasDropout& c);
void bias_dropout_backward_cpu(const BiasDropout& c);

}  // namespace zoo
