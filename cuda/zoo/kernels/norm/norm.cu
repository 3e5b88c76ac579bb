// The norm on GPUs: the maths, the memory contract and the bits of norm.h. Compile with -fmad=false.
#include "../common/blocks.cuh"
#include "../common/squares.cuh"
#include "norm.h"

namespace zoo {
namespace {

template <class Rows>
__global__ void __launch_bounds__(THREADS)
    norm_kernel(const __grid_constant__ Rows batch, Dtype dtype, float factor, double* parts) {
  alignas(16) __shared__ float tile[TILE];
  const auto [index, begin, end] = part_of(batch, int(blockIdx.x), SQUARES_PART);
  const NormRow row = batch.rows[index];
  double lane = 0;
  for (int64_t at = begin; at < end; at += TILE) {
    const int count = end - at < TILE ? int(end - at) : TILE;
#pragma unroll
    for (int i = 4 * threadIdx.x; i < TILE; i += 4 * THREADS) {
      if (i >= count) continue;
      const int width = count - i < 4 ? count - i : 4;
      Four x = load4(row.x, dtype, at + i, width);
      if (factor != 1.0f) {
        for (int k = 0; k < 4; ++k) x.x[k] = rounded(factor * x.x[k], dtype);  // as stored: may be an infinity now
        store4(x, row.x, dtype, at + i, width);
      }
      *reinterpret_cast<float4*>(tile + i) = make_float4(x.x[0], x.x[1], x.x[2], x.x[3]);
    }
    __syncthreads();
    if (threadIdx.x < SHORT_LANES) add_tile(tile, count, lane);
    __syncthreads();
  }
  if (threadIdx.x < WARP) {
    const double sum = sum_lanes(lane);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
  }
}

}  // namespace

namespace cuda {

int32_t scale_norm(const NormRow* rows, int64_t num_rows, Dtype dtype, float factor, double* parts, double* sums,
                   void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const auto launch = [&](const auto& batch, int64_t first_row, int64_t first_part) {
    const int blocks = batch.first[batch.count];
    if (blocks > 0) norm_kernel<<<blocks, THREADS, 0, s>>>(batch, dtype, factor, parts + first_part);
    row_sums_kernel<1><<<batch.count, THREADS, 0, s>>>(batch, parts + first_part, sums + first_row);
  };
  return each_batch(rows, num_rows, SQUARES_PART, launch);
}

}  // namespace cuda
}  // namespace zoo
