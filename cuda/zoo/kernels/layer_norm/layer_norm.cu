// Layer normalisation on CUDA: a warp a row; for dw and db a thread a column and part of 64 rows.
#include "../common/device.cuh"
#include "../common/lanes.h"
#include "layer_norm.h"

namespace zoo {
namespace {

__global__ void forward_kernel(LayerNorm c) {
  const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= c.rows) return;
  const int64_t first = row * c.dim;
  const void* source = c.x;
  if (c.residual != nullptr) {  // each thread reads back only what it wrote itself
    for (int64_t i = threadIdx.x % WARP; i < c.dim; i += WARP)
      store(c.sum, c.dtype, first + i, load(c.x, c.dtype, first + i) + load(c.residual, c.dtype, first + i));
    source = c.sum;
  }
  const float mean = warp_sum(c.dim, [&](int64_t i) { return load(source, c.dtype, first + i); }) * c.inverse_dim;
  const float variance = warp_sum(c.dim, [&](int64_t i) {
    const float d = load(source, c.dtype, first + i) - mean;
    return d * d;
  }) * c.inverse_dim;
  const float rstd = rstd_of(variance, c.eps);
  if (threadIdx.x % WARP == 0) {
    c.mean[row] = mean;
    c.rstd[row] = rstd;
  }
  for (int64_t i = threadIdx.x % WARP; i < c.dim; i += WARP)
    store(c.y, c.dtype, first + i, layer_norm_of(load(source, c.dtype, first + i), mean, rstd,
                                                 load(c.weight, c.weight_dtype, i), load(c.bias, c.weight_dtype, i)));
}

__global__ void backward_kernel(LayerNormBackward c) {
  const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= c.rows) return;
  const int64_t first = row * c.dim;
  const float mean = c.mean[row], rstd = c.rstd[row];
  const auto hat = [&](int64_t i) { return normalised(load(c.sum, c.dtype, first + i), mean, rstd); };
  const auto g = [&](int64_t i) { return load(c.grad_y, c.dtype, first + i) * load(c.weight, c.weight_dtype, i); };
  const float alpha = warp_sum(c.dim, g) * c.inverse_dim;
  const float beta = warp_sum(c.dim, [&](int64_t i) { return g(i) * hat(i); }) * c.inverse_dim;
  for (int64_t i = threadIdx.x % WARP; i < c.dim; i += WARP) {
    float dx = layer_norm_grad(g(i), hat(i), alpha, beta, rstd);
    if (c.grad_sum != nullptr) dx += load(c.grad_sum, c.dtype, first + i);
    store(c.grad_x, c.dtype, first + i, dx);
  }
}

__global__ void parts_kernel(LayerNormBackward c, float* parts) {
  const int64_t i = int64_t(blockIdx.y) * blockDim.x + threadIdx.x, part = blockIdx.x;
  if (i >= c.dim) return;
  const int64_t begin = part * PART_ROWS, end = begin + PART_ROWS < c.rows ? begin + PART_ROWS : c.rows;
  float dw = 0.0f, db = 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const float dy = load(c.grad_y, c.dtype, row * c.dim + i);
    dw += dy * normalised(load(c.sum, c.dtype, row * c.dim + i), c.mean[row], c.rstd[row]);
    db += dy;
  }
  float* mine = parts + part * parts_width(c.dim);
  mine[i] = dw;
  mine[padded(c.dim) + i] = db;
}

}  // namespace

namespace cuda {

int32_t layer_norm(const LayerNorm& c, void* stream) {
  if (c.rows == 0) return cudaSuccess;
  forward_kernel<<<blocks_for(c.rows, WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t layer_norm_backward(const LayerNormBackward& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t n = c.dim, count = num_parts(c.rows), width = parts_width(n);
  const unsigned columns = blocks_for(n, THREADS);
  if (columns > MAX_COLUMNS) return cudaErrorInvalidValue;
  if (count > 0) {
    backward_kernel<<<blocks_for(c.rows, WARPS), WARP * WARPS, 0, s>>>(c);
    parts_kernel<<<dim3(unsigned(count), columns), THREADS, 0, s>>>(c, parts);
  }
  sum_parts_kernel<<<columns, THREADS, 0, s>>>(parts, count, width, c.grad_weight, c.weight_dtype, n);
  sum_parts_kernel<<<columns, THREADS, 0, s>>>(parts + padded(n), count, width, c.grad_bias, c.weight_dtype, n);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
