// Numbers by place on CUDA: a thread four numbers, which one counter gives.
#include "uniform.h"

#include "../common/device.cuh"
#include "../common/philox.h"

namespace zoo {
namespace {

__global__ void __launch_bounds__(THREADS) uniform_kernel(Uniform c) {
  const int64_t blocks = c.blocks(), all = c.rows * blocks;
  for (int64_t at = int64_t(blockIdx.x) * THREADS + threadIdx.x; at < all; at += int64_t(gridDim.x) * THREADS) {
    const int64_t row = at / blocks, first = at % blocks;
    uint32_t word[4];
    philox({c.seed, uint64_t(c.places[row])}, uint64_t(first), word);
    for (int64_t i = 0; i < 4 && 4 * first + i < c.count; ++i)
      c.u[row * c.count + 4 * first + i] = (double(word[i]) + 0.5) * 0x1p-32;
  }
}

}  // namespace

namespace cuda {

int32_t uniform(const Uniform& c, void* stream) {
  const int64_t all = c.rows * c.blocks();
  if (all == 0) return cudaSuccess;
  const int64_t wanted = (all + THREADS - 1) / THREADS;
  uniform_kernel<<<unsigned(wanted < MAX_ROWS ? wanted : MAX_ROWS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
