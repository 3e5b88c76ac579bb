// Numbers that are a function of their place, in (0, 1): what sampling makes noise of.
//
//   u[r][i] = (w + 1/2)/2^32, w word i mod 4 of Philox4x32-10 with the counter (i / 4, place r) and the key seed
//             (common/philox.h)
//
// Exact in fp64, so every instruction set, any number of threads, CUDA and reference.py give the same bits.
//
// Memory contract. places (R,) int64, as 64 bits without a sign; u (R, N) fp64; contiguous. Writes u once.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   uniform_kernel 256 threads, <= 40 registers, >= 48 warps
#pragma once

#include "../common/isa.h"

namespace zoo {

struct Uniform {
  const int64_t* places;
  double* u;
  int64_t rows, count;
  uint64_t seed;

  ZOO_HD int64_t blocks() const { return (count + 3) / 4; }  // of words, in a row
};

ZOO_KERNEL(uniform, const Uniform& c)

}  // namespace zoo
