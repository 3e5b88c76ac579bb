// Column sums on CUDA (lanes.h has the order): a block of matrix.cuh has a part of 64 rows, then the parts are added
// up.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   sum_parts_kernel 256 threads, <= 32 registers, >= 64 warps
#pragma once

#include "lanes.h"
#include "matrix.cuh"

namespace zoo {

// The sums that a thread has of its columns, from `column` on, to those of the part of its block.
template <int WIDTH>
__device__ __forceinline__ void put_sums(const Pack<WIDTH>& sums, float* parts, int64_t stride, int64_t column) {
#pragma unroll
  for (int m = 0; m < WIDTH; ++m) parts[blockIdx.x * stride + column + m] = sums.x[m];
}

static __global__ void sum_parts_kernel(const float* parts, int64_t num_parts, int64_t stride, void* to, Dtype dtype,
                                        int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t p = 0; p < num_parts; ++p) sum += parts[p * stride + i];
  store(to, dtype, i, sum);
}

// to[i] = Σ_p parts[p·stride + i] in the order of p, rounded to `dtype`, for i < n; parts of `rows` rows.
static inline int32_t sum_parts(const float* parts, int64_t rows, int64_t stride, void* to, Dtype dtype, int64_t n,
                                cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  sum_parts_kernel<<<blocks_for(n, THREADS), THREADS, 0, stream>>>(parts, num_parts(rows), stride, to, dtype, n);
  return cudaGetLastError();
}

}  // namespace zoo
