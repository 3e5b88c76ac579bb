// Softmax on CUDA: a warp a row.
#include "../common/device.cuh"
#include "softmax.h"

namespace zoo {
namespace {

__global__ void softmax_kernel(Softmax c) {
  const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= c.rows) return;
  const int t = threadIdx.x % WARP;
  const int64_t first = row * c.keys, n = visible_keys(c, row);
  const int64_t offset = c.mask != nullptr ? mask_offset(c, row) : 0;
  const auto v = [&](int64_t i) {
    const float x = c.scale * load(c.x, c.dtype, first + i);
    return c.mask != nullptr ? x + load(c.mask, c.mask_dtype, offset + i) : x;
  };
  float maximum = float_of_bits(0xFF800000u);
  for (int64_t i = t; i < n; i += WARP) maximum = larger(maximum, v(i));
  for (int half = WARP / 2; half > 0; half /= 2) maximum = larger(maximum, __shfl_xor_sync(ALL, maximum, half));
  const float shift = shift_of(maximum);
  const float inverse = inverse_of(warp_sum(n, [&](int64_t i) { return exp_of(v(i) - shift); }));
  for (int64_t i = t; i < c.keys; i += WARP)
    store(c.y, c.dtype, first + i, i < n ? exp_of(v(i) - shift) * inverse : hidden_of(inverse));
}

__global__ void softmax_backward_kernel(SoftmaxBackward c) {
  const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (row >= c.rows) return;
  const int64_t first = row * c.keys;
  const auto y = [&](int64_t i) { return load(c.y, c.dtype, first + i); };
  const auto dy = [&](int64_t i) { return load(c.grad_y, c.dtype, first + i); };
  const float dot = warp_sum(c.keys, [&](int64_t i) { return dy(i) * y(i); });
  for (int64_t i = threadIdx.x % WARP; i < c.keys; i += WARP)
    store(c.grad_x, c.dtype, first + i, softmax_grad(c.scale, y(i), dy(i), dot));
}

}  // namespace

namespace cuda {

int32_t softmax(const Softmax& c, void* stream) {
  if (c.rows == 0) return cudaSuccess;
  softmax_kernel<<<blocks_for(c.rows, WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t softmax_backward(const SoftmaxBackward& c, void* stream) {
  if (c.rows == 0) return cudaSuccess;
  softmax_backward_kernel<<<blocks_for(c.rows, WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
