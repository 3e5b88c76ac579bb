// Activations on CUDA: each thread takes numbers of a in steps of the grid.
#include "../common/device.cuh"
#include "activation.h"

namespace zoo {
namespace {

constexpr int64_t MOST_BLOCKS = 65535;

template <int FORM, bool BACKWARD>
__global__ void activation_kernel(Activation c) {
  const int64_t count = c.rows * c.dim, step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += step) {
    const int64_t p = c.gated ? at + at / c.dim * c.dim : at;
    const float z = load(c.pre, c.dtype, p), u = c.gated ? load(c.pre, c.dtype, p + c.dim) : 0.0f;
    float slope;
    const float y = activation_of<FORM, BACKWARD>(z, slope);
    if constexpr (BACKWARD) {
      const float da = load(c.grad_a, c.dtype, at);
      store(c.grad_pre, c.dtype, p, (c.gated ? da * u : da) * slope);
      if (c.gated) store(c.grad_pre, c.dtype, p + c.dim, da * y);
    }
    store(c.a, c.dtype, at, c.gated ? y * u : y);
  }
}

template <bool BACKWARD>
int32_t launch(const Activation& c, void* stream) {
  const int64_t count = c.rows * c.dim, wanted = ceil_div(count, THREADS);
  if (count == 0) return cudaSuccess;
  const unsigned blocks = unsigned(wanted < MOST_BLOCKS ? wanted : MOST_BLOCKS);
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (c.form == SILU) activation_kernel<SILU, BACKWARD><<<blocks, THREADS, 0, s>>>(c);
  else if (c.form == GELU) activation_kernel<GELU, BACKWARD><<<blocks, THREADS, 0, s>>>(c);
  else if (c.form == GELU_BY_TANH) activation_kernel<GELU_BY_TANH, BACKWARD><<<blocks, THREADS, 0, s>>>(c);
  else activation_kernel<RELU, BACKWARD><<<blocks, THREADS, 0, s>>>(c);
  return cudaGetLastError();
}

}  // namespace

namespace cuda {

int32_t activate(const Activation& c, void* stream) { return launch<false>(c, stream); }

int32_t activate_backward(const Activation& c, void* stream) { return launch<true>(c, stream); }

}  // namespace cuda
}  // namespace zoo
