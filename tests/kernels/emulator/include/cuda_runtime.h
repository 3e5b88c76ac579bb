// Kernels of CUDA on the CPU, for tests of their indices and their order of roundings: a fiber a thread of CUDA, one
// block at a time. It takes the place of CUDA's header of this name; the translation (__init__.py) turns <<<...>>> into
// calls of zoo_emulator::launch, __syncthreads into zoo_emulator::barrier, and gives barriers and masks numbers.
//
// What it holds kernels to: all threads that are not done come to one barrier; exchanges within a warp are reached, at
// one place, by exactly the lanes that they name (else an error); 16-byte accesses are aligned (-fsanitize=alignment);
// launches are within CUDA's limits; shared memory begins as NaNs for each block. Threads run one after the other, in
// an order that the test chooses or draws, and change at barriers and exchanges only: a missing barrier shows as other
// results in some order. It knows nothing of speed, of memory models, or of registers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>

#include "zoo_emulator/threads.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define CUDART_VERSION 13000

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) ushort4 {
  uint16_t x, y, z, w;
};
struct alignas(4) char4 {
  int8_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline ushort4 make_ushort4(uint16_t x, uint16_t y, uint16_t z, uint16_t w) { return {x, y, z, w}; }
inline char4 make_char4(int8_t x, int8_t y, int8_t z, int8_t w) { return {x, y, z, w}; }

using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };

namespace zoo_emulator {

inline cudaError_t last_error = cudaSuccess;

inline void launch(dim3 grid, dim3 block, size_t shared, cudaStream_t, const std::function<void()>& kernel) {
  const int threads = int(block.x * block.y * block.z);
  const bool fits = grid.x > 0 && grid.y > 0 && grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && threads > 0 &&
                    threads <= 1024 && block.z == 1 && grid.z == 1 && shared <= (48u << 10);
  if (!fits) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  run_grid(grid, block, shared, kernel);
}

template <class T>
T exchanged(unsigned mask, T value, int (*from)(int, int, int), int argument, int width) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = exchange(mask, bits);
  const int lane = int(threadIdx.x + threadIdx.y * blockDim.x) % WARP, source = from(lane, argument, width);
  if ((mask >> source & 1) == 0)
    throw std::runtime_error("emulated CUDA: a shuffle reads a thread outside of its mask");
  memcpy(&value, &all[source], sizeof(T));
  return value;
}

}  // namespace zoo_emulator

// c + Σ of four signed bytes of a times those of b.
inline int32_t __dp4a(int32_t a, int32_t b, int32_t c) {
  for (int i = 0; i < 32; i += 8) c += int32_t(int8_t(a >> i)) * int32_t(int8_t(b >> i));
  return c;
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { zoo_emulator::exchange(mask, 0); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return zoo_emulator::exchanged(
      mask, value, [](int lane, int k, int w) { return (lane & ~(w - 1)) + (k & (w - 1)); }, source, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return zoo_emulator::exchanged(
      mask, value, [](int lane, int k, int w) { return ((lane ^ k) | (w - 1)) == (lane | (w - 1)) ? lane ^ k : lane; },
      bits, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return zoo_emulator::exchanged(
      mask, value, [](int lane, int k, int w) { return (lane & (w - 1)) >= k ? lane - k : lane; }, int(delta), width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return zoo_emulator::exchanged(
      mask, value, [](int lane, int k, int w) { return (lane & (w - 1)) + k < w ? lane + k : lane; }, int(delta),
      width);
}
inline unsigned __ballot_sync(unsigned mask, int flag) {
  const uint64_t* all = zoo_emulator::exchange(mask, flag != 0);
  unsigned found = 0;
  for (int k = 0; k < 32; ++k)
    if (mask >> k & 1) found |= unsigned(all[k] & 1) << k;
  return found;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = zoo_emulator::exchange(mask, bits);
  unsigned found = 0;
  for (int k = 0; k < 32; ++k)
    if ((mask >> k & 1) && all[k] == bits) found |= 1u << k;
  return found;
}

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = T(before + value);
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  *at = std::min(before, value);
  return before;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline uint32_t max(uint32_t a, uint32_t b) { return std::max(a, b); }

inline cudaError_t cudaGetLastError() { return std::exchange(zoo_emulator::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t) { return "refused by the emulator"; }
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t size, cudaStream_t) {
  memset(at, value, size);
  return cudaSuccess;
}
