// A linear layer on packed weights on CUDA.
//
// Few tokens: a block of threads has a block of 32 rows and up to eight tokens. A warp takes eight lines, 16 columns
// of one group, at a time; its threads a quarter of a line each, 8 rows of both columns, in one access of 16 bytes
// (4 bits: of 8). Warps take turns along K; their sums meet in shared memory, in order.
#include <cmath>

#include "../common/device.cuh"
#include "packed_linear.h"

namespace zoo {
namespace {

constexpr int64_t ROWS = PACKED_ROWS;
constexpr int OF_BLOCK = THREADS / WARP;  // warps
constexpr int MOST = 8;                   // tokens of a block

// Code `at` of a row of the last N mod 32, or of any tensor as quantise writes it, as a number.
__device__ __forceinline__ int32_t code_at(const void* q, int64_t at, int bits, bool symmetric) {
  const uint32_t byte = static_cast<const uint8_t*>(q)[at * bits / 8];
  const uint32_t up = bits == 8 ? byte << 24 : byte << (28 - at % 2 * 4);
  return symmetric ? int32_t(up) >> (32 - bits) : int32_t(up >> (32 - bits));
}

// Of the two columns of quarter `l` of a line the codes of rows 4l + j, and 16 + 4l + j from j = 4 on.
struct Quarter {
  uint32_t words[4];

  __device__ __forceinline__ int32_t code(int bits, bool symmetric, int j, int i) const {
    const int bit = bits == 8 ? j % 2 * 16 + i * 8 : j % 2 * 16 + i * 8 + j / 4 * 4;
    const uint32_t up = words[bits == 8 ? j / 2 : j % 4 / 2] << (32 - bits - bit);
    return symmetric ? int32_t(up) >> (32 - bits) : int32_t(up >> (32 - bits));
  }
};

template <int BITS>
__device__ __forceinline__ Quarter quarter_of(const uint8_t* line, int l) {
  if constexpr (BITS == 8) {
    const uint4 q = reinterpret_cast<const uint4*>(line)[l];
    return {{q.x, q.y, q.z, q.w}};
  } else {
    const uint2 q = reinterpret_cast<const uint2*>(line)[l];
    return {{q.x, q.y, 0, 0}};
  }
}

// Element (token m, row r of the whole layer) of y.
__device__ __forceinline__ void finish(const PackedLinear& c, int64_t m, int64_t row, float sum) {
  if (c.bias != nullptr) sum += load(c.bias, c.bias_dtype, row);
  store(c.y, c.dtype, m * c.w.rows + row, sum);
}

// Blocks along x: whole blocks of rows; along y: MT tokens each.
template <int BITS, bool SYMMETRIC, int MT>
__global__ void __launch_bounds__(THREADS, 2) packed_linear_kernel(PackedLinear c) {
  const int warp = threadIdx.x / WARP, thread = threadIdx.x % WARP, l = thread % 4;
  const int64_t first = int64_t(blockIdx.y) * MT, columns = c.w.columns;
  const int tokens = c.tokens - first < MT ? int(c.tokens - first) : MT;
  const uint8_t* const lines = static_cast<const uint8_t*>(c.w.q) + int64_t(blockIdx.x) * (columns / 2) * (8 * BITS);
  const int64_t of_groups = int64_t(blockIdx.x) * (columns / c.w.group) * ROWS + 4 * l;
  float acc[MT][8] = {};
  for (int64_t k = 16 * warp; k < columns; k += 16 * OF_BLOCK) {
    const int64_t mine = k + 2 * (thread / 4);  // of the two columns of this thread
    const Quarter codes = quarter_of<BITS>(lines + mine / 2 * (8 * BITS), l);
    const int64_t at = of_groups + k / c.w.group * ROWS;
    float w[8][2];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int64_t row = at + j / 4 * 16 + j % 4;
      const float scale = c.w.scales[row], low = SYMMETRIC ? 0.0f : c.w.minima[row];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float y = scale * float(codes.code(BITS, SYMMETRIC, j, i));
        w[j][i] = SYMMETRIC ? y : y + low;
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      if (m >= tokens) continue;
      const int64_t from = (first + m) * columns + mine;
      const float x0 = load(c.x, c.dtype, from), x1 = load(c.x, c.dtype, from + 1);
#pragma unroll
      for (int j = 0; j < 8; ++j) acc[m][j] = fmaf(x1, w[j][1], fmaf(x0, w[j][0], acc[m][j]));
    }
  }
  __shared__ float parts[OF_BLOCK][MT][ROWS];
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      for (int half = 4; half < WARP; half *= 2) acc[m][j] += __shfl_xor_sync(ALL, acc[m][j], half);
      if (thread < 4) parts[warp][m][j / 4 * 16 + 4 * l + j % 4] = acc[m][j];
    }
  __syncthreads();
  if (warp >= tokens) return;  // MOST tokens, as many as warps
  float sum = 0.0f;
  for (int part = 0; part < OF_BLOCK; ++part) sum += parts[part][warp][thread];
  finish(c, first + warp, int64_t(blockIdx.x) * ROWS + thread, sum);
}

// The rows that are no whole block: a warp for each, along x, and for each token, along y.
__global__ void __launch_bounds__(WARP) packed_rest_kernel(PackedLinear c) {
  const int64_t row = c.w.rows / ROWS * ROWS + blockIdx.x, m = blockIdx.y, columns = c.w.columns;
  const bool symmetric = c.w.minima == nullptr;
  float sum = 0.0f;
  for (int64_t k = threadIdx.x; k < columns; k += WARP) {
    const int64_t g = row * (columns / c.w.group) + k / c.w.group;
    const float y = c.w.scales[g] * float(code_at(c.w.q, row * columns + k, c.w.bits, symmetric));
    sum = fmaf(load(c.x, c.dtype, m * columns + k), symmetric ? y : y + c.w.minima[g], sum);
  }
  for (int half = WARP / 2; half > 0; half /= 2) sum += __shfl_xor_sync(ALL, sum, half);
  if (threadIdx.x == 0) finish(c, m, row, sum);
}

// Blocks of 32 rows along x, a thread a row; pairs of columns along y and the warps.
__global__ void __launch_bounds__(THREADS) packed_columns_kernel(PackedWeight w, void* out, Dtype dtype, int64_t row,
                                                                 int64_t num_rows, int64_t begin, int64_t count) {
  const int64_t mine = int64_t(blockIdx.x) * ROWS + threadIdx.x % WARP, of_all = row + mine;
  if (mine >= num_rows) return;
  const bool symmetric = w.minima == nullptr, whole = of_all < w.rows / ROWS * ROWS;
  const int64_t groups = w.groups(), block = of_all / ROWS * ROWS, r = of_all - block;
  for (int64_t pair = int64_t(blockIdx.y) * OF_BLOCK + threadIdx.x / WARP; pair < count / 2;
       pair += int64_t(gridDim.y) * OF_BLOCK) {
    const int64_t k = begin + 2 * pair, g = k / w.group;
    const int64_t at = whole ? (block * groups + g * ROWS) + r : of_all * groups + g;
    const float scale = w.scales[at], low = symmetric ? 0.0f : w.minima[at];
    for (int i = 0; i < 2; ++i) {
      int64_t code = of_all * w.columns + k + i;
      if (whole) {
        const int64_t line = block * w.columns * w.bits / 8 + k / 2 * w.line_bytes();
        code = (line + place_in_line(w.bits, int(r), i)) * (8 / w.bits) + (w.bits == 4 && r >= 16 ? 1 : 0);
      }
      const float y = scale * float(code_at(w.q, code, w.bits, symmetric));
      store(out, dtype, (2 * pair + i) * num_rows + mine, symmetric ? y : y + low);
    }
  }
}

template <int BITS, bool SYMMETRIC>
void launch(const PackedLinear& c, cudaStream_t stream) {
  const int each = c.tokens == 1 ? 1 : c.tokens == 2 ? 2 : c.tokens <= 4 ? 4 : MOST;
  const dim3 blocks(unsigned(c.w.rows / ROWS), blocks_for(c.tokens, each));
  if (each == 1) packed_linear_kernel<BITS, SYMMETRIC, 1><<<blocks, THREADS, 0, stream>>>(c);
  else if (each == 2) packed_linear_kernel<BITS, SYMMETRIC, 2><<<blocks, THREADS, 0, stream>>>(c);
  else if (each == 4) packed_linear_kernel<BITS, SYMMETRIC, 4><<<blocks, THREADS, 0, stream>>>(c);
  else packed_linear_kernel<BITS, SYMMETRIC, MOST><<<blocks, THREADS, 0, stream>>>(c);
}

}  // namespace

namespace cuda {

int32_t packed_linear(const PackedLinear& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t blocks = c.w.rows / ROWS, rest = c.w.rows % ROWS;
  if (blocks > MAX_ROWS || c.tokens > PACKED_TOKENS) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  if (blocks > 0) {
    const auto run = c.w.minima == nullptr ? c.w.bits == 8 ? launch<8, true> : launch<4, true>
                     : c.w.bits == 8       ? launch<8, false>
                                           : launch<4, false>;
    run(c, s);
  }
  if (rest > 0) packed_rest_kernel<<<dim3(unsigned(rest), unsigned(c.tokens)), WARP, 0, s>>>(c);
  return cudaGetLastError();
}

int32_t packed_columns(const PackedWeight& w, void* out, Dtype dtype, int64_t row, int64_t num_rows, int64_t begin,
                       int64_t count, void* stream) {
  const int64_t blocks = ceil_div(num_rows, ROWS), turns = ceil_div(count / 2, OF_BLOCK);
  if (blocks > MAX_ROWS) return cudaErrorInvalidValue;
  if (num_rows == 0 || count == 0) return cudaSuccess;
  const dim3 grid(unsigned(blocks), unsigned(turns < MAX_COLUMNS ? turns : MAX_COLUMNS));
  packed_columns_kernel<<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(w, out, dtype, row, num_rows, begin,
                                                                                 count);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
