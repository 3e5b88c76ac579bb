// Bias and GELU on CUDA: a thread eight columns, or one, of 16 rows, or of the 64 that a sum has.
#include "../common/columns.cuh"
#include "bias_gelu.h"

namespace zoo {
namespace {

template <int FORM, bool BACKWARD, int WIDTH>
__global__ void __launch_bounds__(THREADS) bias_gelu_kernel(BiasGelu c, float* parts) {
  constexpr int AHEAD = WIDTH == 1 ? 8 : BACKWARD ? 2 : 4;
  const int64_t i = my_column<WIDTH>();
  if (i >= c.dim) return;
  const Pack<WIDTH> b = load_pack<WIDTH>(c.bias, c.bias_dtype, i);
  Pack<WIDTH> sum = {};
  Bits<WIDTH> x[AHEAD], dy[AHEAD];
  const auto ask = [&](int64_t row, int k) {
    x[k] = fetch<WIDTH>(c.x, c.dtype, row * c.dim + i);
    if constexpr (BACKWARD) dy[k] = fetch<WIDTH>(c.grad_y, c.dtype, row * c.dim + i);
  };
  each_row<AHEAD>(my_rows(c.rows, BACKWARD ? PART_ROWS : FEW_ROWS), ask, [&](int64_t row, int k) {
    const Pack<WIDTH> z = widened(x[k], c.dtype);
    Pack<WIDTH> out = {};
    if constexpr (BACKWARD) out = widened(dy[k], c.dtype);
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) {
      if constexpr (BACKWARD) {
        out.x[m] = out.x[m] * gelu_grad<FORM>(z.x[m] + b.x[m]);
        sum.x[m] += out.x[m];
      } else {
        out.x[m] = gelu_of<FORM>(z.x[m] + b.x[m]);
      }
    }
    store_pack(out, c.out, c.dtype, row * c.dim + i);
  });
  if constexpr (BACKWARD) put_sums(sum, parts, c.dim, i);
}

template <bool BACKWARD, int WIDTH>
int32_t launch(const BiasGelu& c, float* parts, cudaStream_t stream) {
  const Grid g = grid_of(c.rows, BACKWARD ? PART_ROWS : FEW_ROWS, c.dim, WIDTH);
  if (c.rows == 0 || c.dim == 0) return cudaSuccess;
  if (!g.fits) return cudaErrorInvalidValue;
  if (c.form == GELU_TANH) bias_gelu_kernel<GELU_TANH, BACKWARD, WIDTH><<<g.blocks, g.threads, 0, stream>>>(c, parts);
  else bias_gelu_kernel<GELU_ERF, BACKWARD, WIDTH><<<g.blocks, g.threads, 0, stream>>>(c, parts);
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int32_t bias_gelu(const BiasGelu& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return in_packs(c.dim, {c.x, c.bias, c.out}) ? launch<false, WIDE>(c, nullptr, s) : launch<false, 1>(c, nullptr, s);
}

int32_t bias_gelu_backward(const BiasGelu& c, float* parts, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const bool wide = in_packs(c.dim, {c.grad_y, c.x, c.bias, c.out});
  const int32_t failed = wide ? launch<true, WIDE>(c, parts, s) : launch<true, 1>(c, parts, s);
  return failed != cudaSuccess ? failed : sum_parts(parts, c.rows, c.dim, c.grad_bias, c.bias_dtype, c.dim, s);
}

}  // namespace cuda
}  // namespace zoo
