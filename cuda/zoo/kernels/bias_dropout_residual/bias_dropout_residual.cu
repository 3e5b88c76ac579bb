// Bias, dropout and residual on CUDA: a thread eight columns, or one, of 16 rows, or of the 64 that a sum has.
//
// A counter gives the words of four elements that follow each other. Eight columns have two counters of their own;
// where threads have one, those of a block make the words of 8 rows together, in shared memory.
#include "../common/columns.cuh"
#include "bias_dropout_residual.h"

namespace zoo {
namespace {

constexpr int AT_ONCE = 8;          // rows whose words are in shared memory
constexpr int WORDS = THREADS + 4;  // of a row of a block, which may begin and end within those of a counter

// The words of the block's elements from `first` on, and of those of the rows after, at words[AT_ONCE][WORDS]: that of
// the first element is at first mod 4. All threads of the block call it.
__device__ __forceinline__ void make_words(const BiasDropout& c, int64_t first, int rows, uint32_t* words) {
  __syncthreads();  // all are done with those before
  const int counters = int(blockDim.x) / 4 + 1;
  for (int g = int(threadIdx.x); g < rows * counters; g += int(blockDim.x)) {
    const int row = g / counters, counter = g % counters;
    philox(c.generator, uint64_t(first + row * c.dim) / 4 + uint64_t(counter), words + row * WORDS + 4 * counter);
  }
  __syncthreads();
}

template <bool BACKWARD, int WIDTH>
__device__ __forceinline__ void one_row(const BiasDropout& c, const Bits<WIDTH>& x, const Bits<WIDTH>& residual,
                                        const Pack<WIDTH>& b, const uint32_t* words, int64_t at, Pack<WIDTH>& sum) {
  const Pack<WIDTH> value = widened(x, c.dtype), r = widened(residual, c.dtype);
  Pack<WIDTH> out;
#pragma unroll
  for (int m = 0; m < WIDTH; ++m) {
    if constexpr (BACKWARD) {
      out.x[m] = dropped(value.x[m], words[m], c.threshold, c.scale);
      sum.x[m] += out.x[m];
    } else {
      out.x[m] = r.x[m] + dropped(value.x[m] + b.x[m], words[m], c.threshold, c.scale);
    }
  }
  store_pack(out, c.out, c.dtype, at);
}

template <bool BACKWARD, int WIDTH>
__global__ void __launch_bounds__(THREADS) bias_dropout_kernel(BiasDropout c, float* parts) {
  const int64_t i = my_column<WIDTH>();
  const bool inside = i < c.dim;
  Pack<WIDTH> b = {}, sum = {};
  if (!BACKWARD && inside) b = load_pack<WIDTH>(c.bias, c.bias_dtype, i);
  const RowRange rows = my_rows(c.rows, BACKWARD ? PART_ROWS : FEW_ROWS);
  if constexpr (WIDTH == WIDE) {
    if (!inside) return;
    constexpr int AHEAD = 2;
    Bits<WIDTH> x[AHEAD], residual[AHEAD] = {};
    const auto ask = [&](int64_t row, int k) {
      x[k] = fetch<WIDTH>(c.x, c.dtype, row * c.dim + i);
      if constexpr (!BACKWARD) residual[k] = fetch<WIDTH>(c.residual, c.dtype, row * c.dim + i);
    };
    each_row<AHEAD>(rows, ask, [&](int64_t row, int k) {
      const int64_t at = row * c.dim + i;
      uint32_t words[WIDE] = {};
      if (c.threshold != 0) {
        philox(c.generator, uint64_t(c.first + at) / 4, words);
        philox(c.generator, uint64_t(c.first + at) / 4 + 1, words + 4);
      }
      one_row<BACKWARD>(c, x[k], residual[k], b, words, at, sum);
    });
  } else {
    __shared__ uint32_t words[AT_ONCE * WORDS];
    for (int64_t row = rows.begin; row < rows.end; row += AT_ONCE) {
      const int count = rows.end - row < AT_ONCE ? int(rows.end - row) : AT_ONCE;
      const int64_t first = c.first + row * c.dim + i - threadIdx.x;
      if (c.threshold != 0) make_words(c, first, count, words);
      if (!inside) continue;
      Bits<1> x[AT_ONCE], residual[AT_ONCE] = {};
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int64_t at = (row + (k < count ? k : count - 1)) * c.dim + i;
        x[k] = fetch<1>(c.x, c.dtype, at);
        if constexpr (!BACKWARD) residual[k] = fetch<1>(c.residual, c.dtype, at);
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        if (k >= count) continue;
        uint32_t word = 0;
        if (c.threshold != 0) word = words[k * WORDS + int((first + k * c.dim) % 4) + int(threadIdx.x)];
        one_row<BACKWARD>(c, x[k], residual[k], b, &word, (row + k) * c.dim + i, sum);
      }
    }
    if (!inside) return;
  }
  if constexpr (BACKWARD) {
    if (parts != nullptr) put_sums(sum, parts, c.dim, i);
  }
}

template <bool BACKWARD, int WIDTH>
int32_t launch(const BiasDropout& c, float* parts, cudaStream_t stream) {
  const Grid g = grid_of(c.rows, BACKWARD ? PART_ROWS : FEW_ROWS, c.dim, WIDTH);
  if (c.rows == 0 || c.dim == 0) return cudaSuccess;
  if (!g.fits) return cudaErrorInvalidValue;
  bias_dropout_kernel<BACKWARD, WIDTH><<<g.blocks, g.threads, 0, stream>>>(c, parts);
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int32_t bias_dropout_residual(const BiasDropout& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool wide = in_packs(c.dim, {c.x, c.bias, c.residual, c.out});
  return wide ? launch<false, WIDE>(c, nullptr, s) : launch<false, 1>(c, nullptr, s);
}

int32_t bias_dropout_residual_backward(const BiasDropout& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int32_t failed = in_packs(c.dim, {c.x, c.out}) ? launch<true, WIDE>(c, parts, s) : launch<true, 1>(c, parts, s);
  return failed != cudaSuccess ? failed : sum_parts(parts, c.rows, c.dim, c.grad_bias, c.bias_dtype, c.dim, s);
}

// As the backward does, which leaves its sums alone then. Packs have counters of their own where the first one has.
int32_t dropout(const BiasDropout& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool wide = c.first % 4 == 0 && in_packs(c.dim, {c.x, c.out});
  return wide ? launch<true, WIDE>(c, nullptr, s) : launch<true, 1>(c, nullptr, s);
}

}  // namespace cuda
}  // namespace zoo
