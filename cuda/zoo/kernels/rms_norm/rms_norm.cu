// Root mean square normalisation on CUDA: a block a row, which is in shared memory between the sum and its use.
#include "rms_norm.h"

#include "../common/matrix.cuh"
#include "../common/rows.cuh"

namespace zoo {
namespace {

// Brings columns [at, at + n) of s into the tile; where there is a residual, the first time also into c.sum.
__device__ __forceinline__ void bring(const RmsNorm& c, int64_t first, int64_t n, bool wide, bool again, float* tile) {
  each_pack(n, wide, [&](auto width, int64_t i) {
    constexpr int WIDTH = decltype(width)::value;
    if (c.residual == nullptr || again) {  // again: each thread reads back only what it wrote itself
      to_tile(load_pack<WIDTH>(c.residual == nullptr ? c.x : c.sum, c.dtype, first + i), tile, i);
      return;
    }
    Pack<WIDTH> s = load_pack<WIDTH>(c.x, c.dtype, first + i);
    const Pack<WIDTH> other = load_pack<WIDTH>(c.residual, c.dtype, first + i);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) s.x[m] = rounded(s.x[m] + other.x[m], c.dtype);
    store_pack(s, c.sum, c.dtype, first + i);
    to_tile(s, tile, i);
  });
}

__global__ void __launch_bounds__(THREADS) rms_norm_kernel(RmsNorm c, bool wide) {
  extern __shared__ float4 memory[];
  float* const tile = reinterpret_cast<float*>(memory);
  const int64_t first = int64_t(blockIdx.x) * c.dim, length = piece_of(c.dim, 1);
  float sums[1];
  LaneSums<1> of_squares;
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    bring(c, first + at, n, wide, false, tile);
    of_squares.add(n, [&](int, int64_t i) { return tile[i] * tile[i]; });
    if (!only) __syncthreads();
  });
  of_squares.fold(sums);
  const float root = rstd_of(sums[0] * c.inverse_dim, c.eps);
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    if (!only) bring(c, first + at, n, wide, true, tile);  // what a thread brings it reads itself
    each_pack(n, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      const Pack<WIDTH> w = load_pack<WIDTH>(c.weight, c.weight_dtype, at + i);
      Pack<WIDTH> y = from_tile<WIDTH>(tile, i);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) y.x[m] = (y.x[m] * root) * (c.plus_one ? 1.0f + w.x[m] : w.x[m]);
      store_pack(y, c.y, c.dtype, first + at + i);
    });
  });
}

}  // namespace

namespace cuda {

int32_t rms_norm(const RmsNorm& c, void* stream) {
  if (c.rows == 0) return cudaSuccess;
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.dim, {c.x, c.residual, c.weight, c.y, c.sum});
  rms_norm_kernel<<<unsigned(c.rows), row_threads(c.dim), row_bytes(c.dim, 1), static_cast<cudaStream_t>(stream)>>>(
      c, wide);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
