// A row on a block: it is brought into shared memory once, as fp32, and summed from there in the order of lanes.h, a
// thread a lane. Rows that are longer than the memory come piece by piece, again for each sweep.
#pragma once

#include <type_traits>

#include "blocks.cuh"
#include "device.cuh"
#include "lanes.h"

namespace zoo {

constexpr int64_t ROW_FLOATS = 11264;  // of a block: 44 KiB, and a multiple of the lanes and of WIDE

// Threads for a row: two warps have the lanes; where a row is long, eight bring it.
static inline unsigned row_threads(int64_t dim) { return dim <= 1024 ? LANES : THREADS; }

// The columns of a piece, of `tiles` rows of floats that are kept at a time.
ZOO_HD int64_t piece_of(int64_t dim, int tiles) {
  const int64_t most = ROW_FLOATS / tiles;
  return dim < most ? ceil_div(dim, 4) * 4 : most;
}

static inline size_t row_bytes(int64_t dim, int tiles) { return size_t(piece_of(dim, tiles) * tiles) * sizeof(float); }

// fn(width, i): elements i, ..., i + width - 1 of [0, n) for this thread, WIDE or 1 of them as a constant. Every sweep
// over a piece gives a thread the same elements.
template <class Fn>
__device__ __forceinline__ void each_pack(int64_t n, bool wide, const Fn& fn) {
  const int64_t whole = wide ? n / WIDE * WIDE : 0;
  for (int64_t i = int64_t(threadIdx.x) * WIDE; i < whole; i += int64_t(blockDim.x) * WIDE)
    fn(std::integral_constant<int, WIDE>(), i);
  for (int64_t i = whole + threadIdx.x; i < n; i += blockDim.x) fn(std::integral_constant<int, 1>(), i);
}

template <int WIDTH>
__device__ __forceinline__ Pack<WIDTH> from_tile(const float* tile, int64_t i) {
  return load_pack<WIDTH>(tile, F32, i);
}

template <int WIDTH>
__device__ __forceinline__ void to_tile(const Pack<WIDTH>& pack, float* tile, int64_t i) {
  store_pack(pack, tile, F32, i);
}

// fn(at, n, only): columns [at, at + n), from left to right; `only`: they are all.
template <class Fn>
__device__ __forceinline__ void each_piece(int64_t dim, int64_t length, const Fn& fn) {
  for (int64_t at = 0; at < dim; at += length) fn(at, dim - at < length ? dim - at : length, dim <= length);
}

// COUNT lane sums at a time; threads 0 to 63 have the lanes of the first, the next 64 those of the second and so on, as
// far as there are threads. All threads of the block call every function.
template <int COUNT>
class LaneSums {
 public:
  // Adds value(which, i), i < n, behind a barrier; n is a multiple of the lanes but for the last time.
  template <class Fn>
  __device__ __forceinline__ void add(int64_t n, const Fn& value) {
    __syncthreads();
    const unsigned groups = blockDim.x / LANES, mine = threadIdx.x / LANES;
#pragma unroll
    for (int which = 0; which < COUNT; ++which) {
      if (which % groups != mine) continue;
#pragma unroll 8
      for (int64_t i = threadIdx.x % LANES; i < n; i += LANES) lane_[which] += value(which, i);
    }
  }

  // The sums, known to all threads; nobody reads what was added any more. Before the next fold comes an add, whose
  // barrier is behind what is read here.
  __device__ __forceinline__ void fold(float (&sums)[COUNT]) {
    __shared__ float lanes[COUNT][LANES];
    const unsigned groups = blockDim.x / LANES, mine = threadIdx.x / LANES;
#pragma unroll
    for (int which = 0; which < COUNT; ++which)
      if (which % groups == mine) lanes[which][threadIdx.x % LANES] = lane_[which];
    __syncthreads();
    const int t = threadIdx.x % WARP;
#pragma unroll
    for (int which = 0; which < COUNT; ++which) {
      float sum = lanes[which][t] + lanes[which][t + WARP];
      for (int half = WARP / 2; half > 0; half /= 2) sum += __shfl_xor_sync(ALL, sum, half);
      sums[which] = sum;
    }
  }

 private:
  float lane_[COUNT] = {};
};

// The greatest of all threads of the block, by `larger`. A kernel that calls it again has a barrier between.
__device__ __forceinline__ float block_maximum(float maximum) {
  __shared__ float of_warps[THREADS / WARP];
  for (int half = WARP / 2; half > 0; half /= 2) maximum = larger(maximum, __shfl_xor_sync(ALL, maximum, half));
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = maximum;
  __syncthreads();
  for (unsigned w = 0; w < blockDim.x / WARP; ++w) maximum = larger(maximum, of_warps[w]);
  return maximum;
}

}  // namespace zoo
