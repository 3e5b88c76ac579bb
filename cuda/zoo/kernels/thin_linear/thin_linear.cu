// Batch-invariant linear layers on CUDA.
//
// Four threads have a row of W, four lanes each, for some tokens: the next 16 columns of 8 rows are 512 bytes for a
// warp, in accesses of 16 bytes (16-bit formats: of 8). Several columns are on their way at a time.
#include "../common/blocks.cuh"
#include "../common/device.cuh"
#include "thin_linear.h"

namespace zoo {
namespace {

constexpr int LANES_OF_ROW = 16;
constexpr int OF_ROW = 4;   // threads
constexpr int MOST = 4;     // tokens of a block
constexpr int FETCHES = 2;  // of W, on their way
constexpr int ROWS = THREADS / OF_ROW;

template <int MT>
__global__ void __launch_bounds__(THREADS, 4) thin_linear_kernel(ThinLinear c) {
  const int l = threadIdx.x % OF_ROW;
  const int64_t row = int64_t(blockIdx.x) * ROWS + threadIdx.x / OF_ROW, first = int64_t(blockIdx.y) * MT;
  const int64_t mine = row < c.rows ? row : c.rows - 1;  // all threads of a warp shuffle
  const int64_t begin = mine * c.columns;
  float acc[MT][4] = {};
  for (int64_t k = 4 * l; k < c.columns; k += FETCHES * LANES_OF_ROW) {
    Four w[FETCHES];
#pragma unroll
    for (int i = 0; i < FETCHES; ++i) {
      const int64_t at = k + i * LANES_OF_ROW, left = c.columns - at;
      w[i] = load4(c.w, c.dtype, begin + (left > 0 ? at : 0), left > 4 ? 4 : left > 0 ? int(left) : 0);
    }
#pragma unroll
    for (int i = 0; i < FETCHES; ++i) {
      const int64_t at = k + i * LANES_OF_ROW, left = c.columns - at;
      if (left <= 0) continue;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const int64_t token = first + m < c.tokens ? first + m : c.tokens - 1;
        const Four x = load4(c.x, c.dtype, token * c.columns + at, left > 4 ? 4 : int(left));
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (j < left) acc[m][j] = fmaf(w[i].x[j], x.x[j], acc[m][j]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    // Lane 4l + j += lane 4l + j + 8, then + 4, then among the four of a thread.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      acc[m][j] += __shfl_xor_sync(ALL, acc[m][j], 2);
      acc[m][j] += __shfl_xor_sync(ALL, acc[m][j], 1);
    }
    const float sum = (acc[m][0] + acc[m][2]) + (acc[m][1] + acc[m][3]);
    if (l == 0 && row < c.rows && first + m < c.tokens) {
      const float y = c.bias == nullptr ? sum : sum + load(c.bias, c.bias_dtype, row);
      store(c.y, c.dtype, (first + m) * c.stride + row, y);
    }
  }
}

template <int MT>
int32_t launch(const ThinLinear& c, cudaStream_t stream) {
  const int64_t x = ceil_div(c.rows, ROWS), y = ceil_div(c.tokens, MT);
  if (x > MAX_ROWS || y > MAX_COLUMNS) return cudaErrorInvalidValue;
  thin_linear_kernel<MT><<<dim3(unsigned(x), unsigned(y)), THREADS, 0, stream>>>(c);
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int32_t thin_linear(const ThinLinear& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (c.tokens == 0 || c.rows == 0) return cudaSuccess;
  if (c.tokens == 1) return launch<1>(c, s);
  if (c.tokens == 2) return launch<2>(c, s);
  return launch<MOST>(c, s);
}

}  // namespace cuda
}  // namespace zoo
