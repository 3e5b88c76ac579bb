// Bias and GELU on CUDA: a thread a column and part of 64 rows.
#include "../common/device.cuh"
#include "../common/lanes.h"
#include "bias_gelu.h"

namespace zoo {
namespace {

template <int FORM, bool BACKWARD>
__global__ void bias_gelu_kernel(BiasGelu c, float* parts) {
  const int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x, part = blockIdx.x;
  if (i >= c.dim) return;
  const int64_t begin = part * PART_ROWS, end = begin + PART_ROWS < c.rows ? begin + PART_ROWS : c.rows;
  const float b = load(c.bias, c.bias_dtype, i);
  float sum = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * c.dim + i;
    const float z = load(c.x, c.dtype, at) + b;
    if constexpr (BACKWARD) {
      const float dx = load(c.grad_y, c.dtype, at) * gelu_grad<FORM>(z);
      store(c.out, c.dtype, at, dx);
      sum += dx;
    } else {
      store(c.out, c.dtype, at, gelu_of<FORM>(z));
    }
  }
  if constexpr (BACKWARD) parts[part * c.dim + i] = sum;
}

template <bool BACKWARD>
int32_t launch(const BiasGelu& c, float* parts, cudaStream_t stream) {
  const int64_t count = num_parts(c.rows);
  if (count == 0 || c.dim == 0) return cudaSuccess;
  const dim3 blocks(unsigned(count), blocks_for(c.dim, THREADS));
  if (blocks.y > MAX_COLUMNS) return cudaErrorInvalidValue;
  if (c.form == GELU_TANH) bias_gelu_kernel<GELU_TANH, BACKWARD><<<blocks, THREADS, 0, stream>>>(c, parts);
  else bias_gelu_kernel<GELU_ERF, BACKWARD><<<blocks, THREADS, 0, stream>>>(c, parts);
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int32_t bias_gelu(const BiasGelu& c, void* stream) {
  return launch<false>(c, nullptr, static_cast<cudaStream_t>(stream));
}

int32_t bias_gelu_backward(const BiasGelu& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int32_t failed = launch<true>(c, parts, s);
  if (failed != cudaSuccess || c.dim == 0) return failed;
  sum_parts_kernel<<<blocks_for(c.dim, THREADS), THREADS, 0, s>>>(parts, num_parts(c.rows), c.dim, c.grad_bias,
                                                                  c.bias_dtype, c.dim);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
