// Bias, dropout and residual on CUDA: a thread four elements, which share a counter; for db a thread a column and part.
#include "../common/device.cuh"
#include "../common/lanes.h"
#include "bias_dropout_residual.h"

namespace zoo {
namespace {

template <bool BACKWARD>
__global__ void bias_dropout_kernel(BiasDropout c) {
  const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, total = c.rows * c.dim;
  if (index * 4 >= total) return;
  uint32_t words[4] = {};
  if (c.threshold != 0) philox(c.generator, uint64_t(index), words);
  for (int k = 0; k < 4; ++k) {
    const int64_t i = index * 4 + k;
    if (i >= total) return;
    const float x = load(c.x, c.dtype, i);
    if constexpr (BACKWARD) {
      store(c.out, c.dtype, i, dropped(x, words[k], c.threshold, c.scale));
    } else {
      const float kept = dropped(x + load(c.bias, c.bias_dtype, i % c.dim), words[k], c.threshold, c.scale);
      store(c.out, c.dtype, i, load(c.residual, c.dtype, i) + kept);
    }
  }
}

// db wants dx before it is rounded: fp32 reads it back, other formats compute it again.
__global__ void parts_kernel(BiasDropout c, float* parts) {
  const int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x, part = blockIdx.x;
  if (i >= c.dim) return;
  const int64_t begin = part * PART_ROWS, end = begin + PART_ROWS < c.rows ? begin + PART_ROWS : c.rows;
  float sum = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * c.dim + i;
    if (c.dtype == F32) {
      sum += static_cast<const float*>(c.out)[at];
      continue;
    }
    uint32_t words[4] = {};
    if (c.threshold != 0) philox(c.generator, uint64_t(at) / 4, words);
    sum += dropped(load(c.x, c.dtype, at), words[at % 4], c.threshold, c.scale);
  }
  parts[part * c.dim + i] = sum;
}

}  // namespace

namespace cuda {

int32_t bias_dropout_residual(const BiasDropout& c, void* stream) {
  const int64_t groups = ceil_div(c.rows * c.dim, 4);
  if (groups == 0) return cudaSuccess;
  bias_dropout_kernel<false><<<blocks_for(groups, THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t bias_dropout_residual_backward(const BiasDropout& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t groups = ceil_div(c.rows * c.dim, 4), count = num_parts(c.rows);
  if (c.dim == 0) return cudaSuccess;
  const unsigned columns = blocks_for(c.dim, THREADS);
  if (columns > MAX_COLUMNS) return cudaErrorInvalidValue;
  if (groups > 0) {
    bias_dropout_kernel<true><<<blocks_for(groups, THREADS), THREADS, 0, s>>>(c);
    parts_kernel<<<dim3(unsigned(count), columns), THREADS, 0, s>>>(c, parts);
  }
  sum_parts_kernel<<<columns, THREADS, 0, s>>>(parts, count, c.dim, c.grad_bias, c.bias_dtype, c.dim);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
