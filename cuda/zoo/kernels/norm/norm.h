// Gradient norm, scaling and the check for infinities and NaNs, in one pass.
//
//   x_i <- σ·x_i                    rounded to the format of x; not written at all for σ = 1
//   S   = Σ x_i²                    of the values as stored, in fp64
//
// S is finite if and only if every x_i is: a square of fp32 is exact in fp64, and 2^128 · 2^128 · n does not overflow.
// So the norm √S, the unscaling of loss-scaled gradients and the decision whether to skip the step cost one pass
// together.
//
// Memory contract: rows of fp32, bf16 or fp16, contiguous; S one fp64 for each row. A row is cut into parts of
// SQUARES_PART elements whose sums are added in order, and a part goes into 16 lanes (lanes.h): S does not depend on
// the threads, on the instruction set or on CPU against CUDA. Against the exact sum |error| <= n·2^-53·S (Higham 2002,
// section 4.2).
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   norm_kernel 256 threads, <= 38 registers, >= 48 warps
// Bytes an element: its own, twice where σ is not 1.
#pragma once

#include "../common/isa.h"

namespace zoo {

struct NormRow {
  void* x;
  int64_t n;
};

// `parts`: one number for each part begun of every row (square_parts); `sums`: one for each row.
ZOO_KERNEL(scale_norm, const NormRow* rows, int64_t num_rows, Dtype dtype, float factor, double* parts, double* sums)

}  // namespace zoo
