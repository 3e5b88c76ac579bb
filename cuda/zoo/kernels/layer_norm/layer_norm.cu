// Layer normalisation on CUDA: a block a row, which is in shared memory between its sums; for dw and db a thread eight
// columns, or one, and a part of 64 rows.
#include "../common/columns.cuh"
#include "../common/rows.cuh"
#include "layer_norm.h"

namespace zoo {
namespace {

// Brings columns [from, from + n) of s into the tile; where there is a residual, the first time also into c.sum.
__device__ __forceinline__ void bring(const LayerNorm& c, int64_t first, int64_t n, bool wide, bool again,
                                      float* tile) {
  each_pack(n, wide, [&](auto width, int64_t i) {
    constexpr int WIDTH = decltype(width)::value;
    if (c.residual == nullptr || again) {  // again: each thread reads back only what it wrote itself
      to_tile(load_pack<WIDTH>(c.residual == nullptr ? c.x : c.sum, c.dtype, first + i), tile, i);
      return;
    }
    const Bits<WIDTH> x = fetch<WIDTH>(c.x, c.dtype, first + i), r = fetch<WIDTH>(c.residual, c.dtype, first + i);
    Pack<WIDTH> s = widened(x, c.dtype);
    const Pack<WIDTH> other = widened(r, c.dtype);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) s.x[m] = rounded(s.x[m] + other.x[m], c.dtype);
    store_pack(s, c.sum, c.dtype, first + i);
    to_tile(s, tile, i);
  });
}

__global__ void __launch_bounds__(THREADS) forward_kernel(LayerNorm c, bool wide) {
  extern __shared__ float4 memory[];
  float* const tile = reinterpret_cast<float*>(memory);
  const int64_t row = blockIdx.x, first = row * c.dim, length = piece_of(c.dim, 1);
  float sums[1];
  LaneSums<1> of_s, of_squares;
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    bring(c, first + at, n, wide, false, tile);
    of_s.add(n, [&](int, int64_t i) { return tile[i]; });
    if (!only) __syncthreads();
  });
  of_s.fold(sums);
  const float mean = sums[0] * c.inverse_dim;
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    if (!only) bring(c, first + at, n, wide, true, tile);
    of_squares.add(n, [&](int, int64_t i) {
      const float d = tile[i] - mean;
      return d * d;
    });
    if (!only) __syncthreads();
  });
  of_squares.fold(sums);
  const float rstd = rstd_of(sums[0] * c.inverse_dim, c.eps);
  if (threadIdx.x == 0) {
    c.mean[row] = mean;
    c.rstd[row] = rstd;
  }
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    if (!only) bring(c, first + at, n, wide, true, tile);  // what a thread brings it reads itself
    each_pack(n, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      const Pack<WIDTH> w = load_pack<WIDTH>(c.weight, c.weight_dtype, at + i);
      const Pack<WIDTH> b = load_pack<WIDTH>(c.bias, c.weight_dtype, at + i);
      Pack<WIDTH> y = from_tile<WIDTH>(tile, i);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) y.x[m] = layer_norm_of(y.x[m], mean, rstd, w.x[m], b.x[m]);
      store_pack(y, c.y, c.dtype, first + at + i);
    });
  });
}

__global__ void __launch_bounds__(THREADS) backward_kernel(LayerNormBackward c, bool wide) {
  extern __shared__ float4 memory[];
  const int64_t row = blockIdx.x, first = row * c.dim, length = piece_of(c.dim, 2);
  float* const hat = reinterpret_cast<float*>(memory);
  float* const g = hat + length;
  const float mean = c.mean[row], rstd = c.rstd[row];
  const auto bring = [&](int64_t at, int64_t n) {
    each_pack(n, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      const Bits<WIDTH> s = fetch<WIDTH>(c.sum, c.dtype, first + at + i);
      const Bits<WIDTH> dy = fetch<WIDTH>(c.grad_y, c.dtype, first + at + i);
      const Pack<WIDTH> w = load_pack<WIDTH>(c.weight, c.weight_dtype, at + i);
      Pack<WIDTH> a = widened(s, c.dtype), b = widened(dy, c.dtype);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) {
        a.x[m] = normalised(a.x[m], mean, rstd);
        b.x[m] = b.x[m] * w.x[m];
      }
      to_tile(a, hat, i);
      to_tile(b, g, i);
    });
  };
  float sums[2];
  LaneSums<2> lanes;
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    bring(at, n);
    lanes.add(n, [&](int which, int64_t i) { return which == 0 ? g[i] : g[i] * hat[i]; });
    if (!only) __syncthreads();
  });
  lanes.fold(sums);
  const float alpha = sums[0] * c.inverse_dim, beta = sums[1] * c.inverse_dim;
  each_piece(c.dim, length, [&](int64_t at, int64_t n, bool only) {
    if (!only) bring(at, n);
    each_pack(n, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      Pack<WIDTH> dx = from_tile<WIDTH>(g, i), ds = {};
      const Pack<WIDTH> a = from_tile<WIDTH>(hat, i);
      if (c.grad_sum != nullptr) ds = load_pack<WIDTH>(c.grad_sum, c.dtype, first + at + i);
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) {
        dx.x[m] = layer_norm_grad(dx.x[m], a.x[m], alpha, beta, rstd);
        if (c.grad_sum != nullptr) dx.x[m] += ds.x[m];
      }
      store_pack(dx, c.grad_x, c.dtype, first + at + i);
    });
  });
}

template <int WIDTH>
__global__ void __launch_bounds__(THREADS) parts_kernel(LayerNormBackward c, float* parts) {
  constexpr int AHEAD = WIDTH == 1 ? 8 : 2;
  const int64_t i = my_column<WIDTH>();
  if (i >= c.dim) return;
  Pack<WIDTH> dw = {}, db = {};
  Bits<WIDTH> dy[AHEAD], s[AHEAD];
  float mean[AHEAD], rstd[AHEAD];
  const auto ask = [&](int64_t row, int k) {
    dy[k] = fetch<WIDTH>(c.grad_y, c.dtype, row * c.dim + i);
    s[k] = fetch<WIDTH>(c.sum, c.dtype, row * c.dim + i);
    mean[k] = c.mean[row];
    rstd[k] = c.rstd[row];
  };
  each_row<AHEAD>(my_rows(c.rows, PART_ROWS), ask, [&](int64_t, int k) {
    const Pack<WIDTH> grad = widened(dy[k], c.dtype), value = widened(s[k], c.dtype);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) {
      dw.x[m] += grad.x[m] * normalised(value.x[m], mean[k], rstd[k]);
      db.x[m] += grad.x[m];
    }
  });
  put_sums(dw, parts, parts_width(c.dim), i);
  put_sums(db, parts, parts_width(c.dim), padded(c.dim) + i);
}

}  // namespace

namespace cuda {

int32_t layer_norm(const LayerNorm& c, void* stream) {
  if (c.rows == 0) return cudaSuccess;
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.dim, {c.x, c.residual, c.weight, c.bias, c.y, c.sum});
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  forward_kernel<<<unsigned(c.rows), row_threads(c.dim), row_bytes(c.dim, 1), s>>>(c, wide);
  return cudaGetLastError();
}

int32_t layer_norm_backward(const LayerNormBackward& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t n = c.dim, width = parts_width(n);
  const bool wide = in_packs(n, {c.grad_y, c.grad_sum, c.sum, c.weight, c.grad_x});
  const Grid g = grid_of(c.rows, PART_ROWS, n, wide ? WIDE : 1);
  if (!g.fits || c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  if (c.rows > 0) {
    backward_kernel<<<unsigned(c.rows), row_threads(n), row_bytes(n, 2), s>>>(c, wide);
    if (wide) parts_kernel<WIDE><<<g.blocks, g.threads, 0, s>>>(c, parts);
    else parts_kernel<1><<<g.blocks, g.threads, 0, s>>>(c, parts);
  }
  const int32_t failed = sum_parts(parts, c.rows, width, c.grad_weight, c.weight_dtype, n, s);
  return failed != cudaSuccess ? failed
                               : sum_parts(parts + padded(n), c.rows, width, c.grad_bias, c.weight_dtype, n, s);
}

}  // namespace cuda
}  // namespace zoo
