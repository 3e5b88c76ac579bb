// Softmax on CUDA: a block a row, which is in shared memory between its maximum, its sum and the result.
#include "../common/matrix.cuh"
#include "../common/rows.cuh"
#include "softmax.h"

namespace zoo {
namespace {

__global__ void __launch_bounds__(THREADS) softmax_kernel(Softmax c, bool wide) {
  extern __shared__ float4 memory[];
  float* const tile = reinterpret_cast<float*>(memory);
  const int64_t row = blockIdx.x, first = row * c.keys, n = visible_keys(c, row), length = piece_of(c.keys, 1);
  const int64_t offset = c.mask != nullptr ? mask_offset(c, row) : 0;
  // v of elements at, ...: of the row's memory, or, where that has been done and they are all, of the tile.
  const auto scores = [&](auto width, int64_t at) {
    constexpr int WIDTH = decltype(width)::value;
    const Bits<WIDTH> x = fetch<WIDTH>(c.x, c.dtype, first + at);
    Bits<WIDTH> mask = {};
    if (c.mask != nullptr) mask = fetch<WIDTH>(c.mask, c.mask_dtype, offset + at);
    Pack<WIDTH> v = widened(x, c.dtype);
    const Pack<WIDTH> more = widened(mask, c.mask_dtype);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) {
      v.x[m] = c.scale * v.x[m];
      if (c.mask != nullptr) v.x[m] = v.x[m] + more.x[m];
    }
    return v;
  };
  float maximum = float_of_bits(0xFF800000u);
  each_piece(n, length, [&](int64_t at, int64_t count, bool) {
    each_pack(count, wide, [&](auto width, int64_t i) {
      const auto v = scores(width, at + i);
#pragma unroll
      for (int m = 0; m < decltype(width)::value; ++m) maximum = larger(maximum, v.x[m]);
      to_tile(v, tile, i);
    });
  });
  const float shift = shift_of(block_maximum(maximum));
  const auto exponentials = [&](auto width, int64_t at, int64_t i, bool only) {
    constexpr int WIDTH = decltype(width)::value;
    Pack<WIDTH> e = only ? from_tile<WIDTH>(tile, i) : scores(width, at + i);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) e.x[m] = exp_of(e.x[m] - shift);
    return e;
  };
  LaneSums<1> lanes;
  each_piece(n, length, [&](int64_t at, int64_t count, bool only) {
    each_pack(count, wide, [&](auto width, int64_t i) { to_tile(exponentials(width, at, i, only), tile, i); });
    lanes.add(count, [&](int, int64_t i) { return tile[i]; });
    if (!only) __syncthreads();
  });
  float sums[1];
  lanes.fold(sums);
  const float inverse = inverse_of(sums[0]);
  each_piece(n, length, [&](int64_t at, int64_t count, bool only) {
    each_pack(count, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      Pack<WIDTH> y = only ? from_tile<WIDTH>(tile, i) : exponentials(width, at, i, false);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) y.x[m] = y.x[m] * inverse;
      store_pack(y, c.y, c.dtype, first + at + i);
    });
  });
  const int64_t rest = ceil_div(n, WIDE) * WIDE < c.keys ? ceil_div(n, WIDE) * WIDE : c.keys;
  for (int64_t i = n + threadIdx.x; i < rest; i += blockDim.x) store(c.y, c.dtype, first + i, hidden_of(inverse));
  each_pack(c.keys - rest, wide, [&](auto width, int64_t i) {
    Pack<decltype(width)::value> y;
#pragma unroll
    for (int m = 0; m < decltype(width)::value; ++m) y.x[m] = hidden_of(inverse);
    store_pack(y, c.y, c.dtype, first + rest + i);
  });
}

__global__ void __launch_bounds__(THREADS) softmax_backward_kernel(SoftmaxBackward c, bool wide) {
  extern __shared__ float4 memory[];
  const int64_t first = int64_t(blockIdx.x) * c.keys, length = piece_of(c.keys, 2);
  float* const y = reinterpret_cast<float*>(memory);
  float* const dy = y + length;
  const auto bring = [&](int64_t at, int64_t count) {
    each_pack(count, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      const Bits<WIDTH> of_y = fetch<WIDTH>(c.y, c.dtype, first + at + i);
      const Bits<WIDTH> of_dy = fetch<WIDTH>(c.grad_y, c.dtype, first + at + i);
      to_tile(widened(of_y, c.dtype), y, i);
      to_tile(widened(of_dy, c.dtype), dy, i);
    });
  };
  LaneSums<1> lanes;
  each_piece(c.keys, length, [&](int64_t at, int64_t count, bool only) {
    bring(at, count);
    lanes.add(count, [&](int, int64_t i) { return dy[i] * y[i]; });
    if (!only) __syncthreads();
  });
  float dot[1];
  lanes.fold(dot);
  each_piece(c.keys, length, [&](int64_t at, int64_t count, bool only) {
    if (!only) bring(at, count);
    each_pack(count, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      Pack<WIDTH> dx = from_tile<WIDTH>(dy, i);
      const Pack<WIDTH> value = from_tile<WIDTH>(y, i);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) dx.x[m] = softmax_grad(c.scale, value.x[m], dx.x[m], dot[0]);
      store_pack(dx, c.grad_x, c.dtype, first + at + i);
    });
  });
}

// Whether a pack of a row has one of the mask.
bool mask_in_packs(const Softmax& c) {
  int64_t strides = 0;
  for (int k = 0; k < c.row_dims; ++k) strides |= c.mask_strides[k];
  return c.mask == nullptr || strides % WIDE == 0;
}

}  // namespace

namespace cuda {

int32_t softmax(const Softmax& c, void* stream) {
  if (c.rows == 0 || c.keys == 0) return cudaSuccess;
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.keys, {c.x, c.mask, c.y}) && mask_in_packs(c);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  softmax_kernel<<<unsigned(c.rows), row_threads(c.keys), row_bytes(c.keys, 1), s>>>(c, wide);
  return cudaGetLastError();
}

int32_t softmax_backward(const SoftmaxBackward& c, void* stream) {
  if (c.rows == 0 || c.keys == 0) return cudaSuccess;
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.keys, {c.grad_y, c.y, c.grad_x});
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  softmax_backward_kernel<<<unsigned(c.rows), row_threads(c.keys), row_bytes(c.keys, 2), s>>>(c, wide);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
