// Activations on CUDA: a thread eight columns of a, or one, of 16 rows.
#include <type_traits>

#include "../common/matrix.cuh"
#include "activation.h"

namespace zoo {
namespace {

template <int FORM, bool BACKWARD, bool GATED, int WIDTH>
__global__ void __launch_bounds__(THREADS) activation_kernel(Activation c) {
  constexpr int AHEAD = (WIDTH == 1 ? 2 : 1) * (BACKWARD ? 1 : 2);
  const int64_t i = my_column<WIDTH>(), wide = GATED ? 2 * c.dim : c.dim;
  if (i >= c.dim) return;
  Bits<WIDTH> pre[AHEAD], gate[AHEAD] = {}, grad[AHEAD] = {};
  const auto ask = [&](int64_t row, int k) {
    pre[k] = fetch<WIDTH>(c.pre, c.dtype, row * wide + i);
    if constexpr (GATED) gate[k] = fetch<WIDTH>(c.pre, c.dtype, row * wide + c.dim + i);
    if constexpr (BACKWARD) grad[k] = fetch<WIDTH>(c.grad_a, c.dtype, row * c.dim + i);
  };
  each_row<AHEAD>(my_rows(c.rows, FEW_ROWS), ask, [&](int64_t row, int k) {
    const Pack<WIDTH> z = widened(pre[k], c.dtype), u = widened(gate[k], c.dtype), da = widened(grad[k], c.dtype);
    Pack<WIDTH> a, dz, du;
#pragma unroll
    for (int m = 0; m < WIDTH; ++m) {
      float slope = 0.0f;
      const float y = activation_of<FORM, BACKWARD>(z.x[m], slope);
      a.x[m] = GATED ? y * u.x[m] : y;
      dz.x[m] = (GATED ? da.x[m] * u.x[m] : da.x[m]) * slope;
      du.x[m] = da.x[m] * y;
    }
    store_pack(a, c.a, c.dtype, row * c.dim + i);
    if constexpr (BACKWARD) store_pack(dz, c.grad_pre, c.dtype, row * wide + i);
    if constexpr (BACKWARD && GATED) store_pack(du, c.grad_pre, c.dtype, row * wide + c.dim + i);
  });
}

template <bool BACKWARD, bool GATED, int WIDTH>
int32_t launch(const Activation& c, cudaStream_t stream) {
  const Grid g = grid_of(c.rows, FEW_ROWS, c.dim, WIDTH);
  if (!g.fits) return cudaErrorInvalidValue;
  const auto run = [&](auto form) {
    activation_kernel<decltype(form)::value, BACKWARD, GATED, WIDTH><<<g.blocks, g.threads, 0, stream>>>(c);
  };
  if (c.form == SILU) run(std::integral_constant<int, SILU>());
  else if (c.form == GELU) run(std::integral_constant<int, GELU>());
  else if (c.form == GELU_BY_TANH) run(std::integral_constant<int, GELU_BY_TANH>());
  else run(std::integral_constant<int, RELU>());
  return cudaGetLastError();
}

template <bool BACKWARD>
int32_t launch(const Activation& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (c.rows == 0 || c.dim == 0) return cudaSuccess;
  const bool wide = in_packs(c.dim, {c.grad_a, c.pre, c.a, c.grad_pre});
  if (c.gated) return wide ? launch<BACKWARD, true, WIDE>(c, s) : launch<BACKWARD, true, 1>(c, s);
  return wide ? launch<BACKWARD, false, WIDE>(c, s) : launch<BACKWARD, false, 1>(c, s);
}

}  // namespace

namespace cuda {

int32_t activate(const Activation& c, void* stream) { return launch<false>(c, stream); }

int32_t activate_backward(const Activation& c, void* stream) { return launch<true>(c, stream); }

}  // namespace cuda
}  // namespace zoo
