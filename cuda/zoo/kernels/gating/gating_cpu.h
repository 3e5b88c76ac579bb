// What the CPU version of gating offers to the binding.
#pragma once

#include "../common/isa.h"
#include "gating.h"

namespace zoo {

// Tokens, or rows, [begin, end). `scratch`, in floats: 2·E + k, 3·E, 2·D and 3·D.
ZOO_DECLARE(void gate_rows(const Gate& c, int64_t begin, int64_t end, float* scratch))
ZOO_DECLARE(void gate_backward_rows(const GateBackward& c, int64_t begin, int64_t end, float* scratch))
ZOO_DECLARE(void unpermute_rows(const Unpermute& c, int64_t begin, int64_t end, float* scratch))
ZOO_DECLARE(void unpermute_backward_rows(const UnpermuteBackward& c, int64_t begin, int64_t end, float* scratch))

void gate_cpu(const Gate& c);
void gate_backward_cpu(const GateBackward& c);
void places_cpu(const Places& c);
void permute_cpu(const Permute& c);
void unpermute_cpu(const Unpermute& c);
void unpermute_backward_cpu(const UnpermuteBackward& c);

// The first of n numbers that is not in [low, high), or -1.
int64_t first_outside(const int64_t* numbers, int64_t n, int64_t low, int64_t high);
// source[rows[s]] = s, -1 elsewhere; returns the first s whose row another has already, or -1.
int64_t invert(const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source);

}  // namespace zoo
