// What the CUDA versions share: elements as fp32, and the sums of lanes.h with a warp for a row.
//
// Compile with -fmad=false: a fused multiply-add would give other bits than the CPU and the reference.
#pragma once

#include <cuda_runtime.h>

#include "numbers.h"

namespace zoo {

constexpr int WARP = 32;
constexpr int WARPS = 4;  // a block of the kernels that give a row to a warp
constexpr int THREADS = 256;
constexpr unsigned MAX_COLUMNS = 65535;   // blocks along y; kernels with a thread a column put parts of rows along x
constexpr int64_t MAX_ROWS = 0x7FFFFFFF;  // blocks along x
constexpr unsigned ALL = 0xFFFFFFFFu;

__device__ __forceinline__ float load(const void* memory, Dtype dtype, int64_t i) {
  if (dtype == F32) return static_cast<const float*>(memory)[i];
  const uint16_t bits = static_cast<const uint16_t*>(memory)[i];
  return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

__device__ __forceinline__ void store(void* memory, Dtype dtype, int64_t i, float value) {
  if (dtype == F32) static_cast<float*>(memory)[i] = value;
  else static_cast<uint16_t*>(memory)[i] = dtype == BF16 ? float_to_bf16(value) : float_to_f16(value);
}

// As it is after a round trip through memory.
__device__ __forceinline__ float rounded(float value, Dtype dtype) {
  if (dtype == F32) return value;
  return dtype == BF16 ? bf16_to_float(float_to_bf16(value)) : f16_to_float(float_to_f16(value));
}

// The lane sum of value(0), ..., value(n - 1), known to all threads of the warp: thread t has lanes t and t + 32.
template <class Fn>
__device__ __forceinline__ float warp_sum(int64_t n, const Fn& value) {
  const int t = threadIdx.x % WARP;
  float low = 0.0f, high = 0.0f;
  for (int64_t i = t; i < n; i += 2 * WARP) {
    low += value(i);
    if (i + WARP < n) high += value(i + WARP);
  }
  low += high;
  for (int half = WARP / 2; half > 0; half /= 2) low += __shfl_xor_sync(ALL, low, half);
  return low;
}

static inline unsigned blocks_for(int64_t work, int64_t each) { return unsigned(ceil_div(work, each)); }

}  // namespace zoo
