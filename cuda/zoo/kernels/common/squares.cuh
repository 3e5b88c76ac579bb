// Sums of squares on GPUs, in the order of squares.h and so with the bits of the CPU: a block a part of
// SQUARES_PART elements, element i in lane i mod 16, the lanes in order, then the parts of a row in order. No atomics.
//
// All threads of a block bring a tile into shared memory, 16 of them add its squares up; meanwhile other blocks of the
// multiprocessor are loading. Squares of fp32 are exact in fp64, so a fused multiply-add rounds as the two operations
// do.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   row_sums_kernel 256 threads, <= 40 registers, >= 48 warps
#pragma once

#include "batch.cuh"
#include "lanes.h"

namespace zoo {

constexpr int TILE = 4096;

// Thread t of a half warp adds the squares t, t + 16, … of the tile's `count` elements to its lane.
__device__ __forceinline__ void add_tile(const float* tile, int count, double& lane) {
#pragma unroll 8
  for (int i = threadIdx.x % SHORT_LANES; i < count; i += SHORT_LANES) {
    const double x = tile[i];
    lane = __fma_rn(x, x, lane);
  }
}

// The sum of the 16 lanes of a half warp, in order; all threads of the warp call it.
__device__ __forceinline__ double sum_lanes(double lane) {
  double sum = 0;
  for (int k = 0; k < SHORT_LANES; ++k) sum += __shfl_sync(ALL, lane, k, SHORT_LANES);
  return sum;
}

// sums[WIDTH·row + k] = Σ over the parts of the row of parts[WIDTH·part + k], in order: a block for each sum.
template <int WIDTH, class Rows>
__global__ void __launch_bounds__(THREADS)
    row_sums_kernel(const __grid_constant__ Rows batch, const double* parts, double* sums) {
  constexpr int AT_ONCE = 1024;
  __shared__ double tile[AT_ONCE];
  const int row = blockIdx.x / WIDTH, which = blockIdx.x % WIDTH;
  const int64_t end = batch.first[row + 1];
  double sum = 0;
  for (int64_t at = batch.first[row]; at < end; at += AT_ONCE) {
    const int count = end - at < AT_ONCE ? int(end - at) : AT_ONCE;
    for (int i = threadIdx.x; i < count; i += THREADS) tile[i] = parts[(at + i) * WIDTH + which];
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) sum += tile[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

}  // namespace zoo
