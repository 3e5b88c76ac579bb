// Kernels of CUDA on the CPU, for tests of their indices and their order of roundings: a fiber a thread of CUDA, one block
// at a time. It takes the place of CUDA's header of this name; build.py turns <<<...>>> into calls of zoo_emulator::launch.
//
// What it holds kernels to: barriers and exchanges within a warp are reached by all that they name (else an error), 16-byte
// accesses are aligned (-fsanitize=alignment), launches are within CUDA's limits. Threads run one after the other, in an
// order that the test chooses, and change at barriers and exchanges only: a missing barrier shows as other results in
// another order. It knows nothing of speed, of memory models, or of registers.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define CUDART_VERSION 13000

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
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

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace zoo_emulator {

constexpr int WARP = 32;
constexpr size_t STACK = 192 << 10;

enum State { READY, AT_BARRIER, AT_EXCHANGE, DONE };

struct Fiber {
  ucontext_t first;  // where it begins
  jmp_buf context;   // where it goes on
  bool begun;
  std::unique_ptr<char[]> stack;
  State state;
  unsigned mask;      // of the exchange that it waits for
  uint64_t value;     // what it brings to that
  uint64_t found[WARP];  // what the others brought, of the latest one
};

inline std::vector<std::unique_ptr<Fiber>> fibers;  // kept from launch to launch
inline ucontext_t unused;
inline jmp_buf scheduler;  // swapcontext asks the system twice for each switch, these jumps never do
inline Fiber* current;
inline const std::function<void()>* body;
inline std::exception_ptr failure;
inline cudaError_t last_error = cudaSuccess;
inline int order = 0;  // 0: rising; 1: falling
inline std::vector<uint4> dynamic_shared;

inline void* shared_memory() { return dynamic_shared.data(); }

inline void run_body() {
  try {
    (*body)();
  } catch (...) {
    failure = std::current_exception();
  }
  current->state = DONE;
  _longjmp(scheduler, 1);
}

inline void wait(State state) {
  current->state = state;
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

// What each thread of the warp that is in `mask` brings; all of them call it.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
  current->mask = mask;
  current->value = value;
  wait(AT_EXCHANGE);
  return current->found;
}

inline void go_on(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (std::exchange(fiber.begun, true)) _longjmp(fiber.context, 1);
  swapcontext(&unused, &fiber.first);
}

inline void start(Fiber& fiber) {
  getcontext(&fiber.first);
  fiber.first.uc_stack = {fiber.stack.get(), 0, STACK};
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, run_body, 0);
  fiber.begun = false;
  fiber.state = READY;
}

[[noreturn]] inline void stuck(const char* what, int thread) {
  throw std::runtime_error("emulated CUDA: thread " + std::to_string(thread) + " of block " +
                           std::to_string(blockIdx.x) + " waits for ever: " + what);
}

// Lets threads go whose exchange or barrier is complete; whether there were any.
inline bool release(int threads) {
  bool any = false, barrier = true;
  for (int t = 0; t < threads; ++t) barrier &= fibers[t]->state == AT_BARRIER || fibers[t]->state == DONE;
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = *fibers[t];
    if (fiber.state == AT_BARRIER && barrier) fiber.state = READY, any = true;
    if (fiber.state != AT_EXCHANGE) continue;
    const int first = t / WARP * WARP;
    bool complete = (fiber.mask >> (t - first) & 1) != 0;
    for (int k = 0; k < WARP; ++k)
      if (fiber.mask >> k & 1)
        complete &= first + k < threads && fibers[first + k]->state == AT_EXCHANGE && fibers[first + k]->mask == fiber.mask;
    if (!complete) continue;
    uint64_t values[WARP] = {};
    const unsigned mask = fiber.mask;
    for (int k = 0; k < WARP; ++k)
      if (mask >> k & 1) values[k] = fibers[first + k]->value;
    for (int k = 0; k < WARP; ++k) {
      if ((mask >> k & 1) == 0) continue;
      std::copy(values, values + WARP, fibers[first + k]->found);
      fibers[first + k]->state = READY;
    }
    any = true;
  }
  return any;
}

inline void run_block(int threads) {
  for (int t = 0; t < threads; ++t) start(*fibers[t]);
  while (true) {
    for (int i = 0; i < threads; ++i) {
      const int t = order == 0 ? i : threads - 1 - i;
      if (fibers[t]->state != READY) continue;
      current = fibers[t].get();
      threadIdx = dim3(unsigned(t) % blockDim.x, unsigned(t) / blockDim.x);
      go_on(*current);
      if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    }
    if (release(threads)) continue;
    for (int t = 0; t < threads; ++t) {
      if (fibers[t]->state == AT_BARRIER) stuck("others do not come to its barrier", t);
      if (fibers[t]->state == AT_EXCHANGE) stuck("others do not come to the exchange within its warp", t);
    }
    return;
  }
}

inline void launch(dim3 grid, dim3 block, size_t shared, cudaStream_t, const std::function<void()>& kernel) {
  const int threads = int(block.x * block.y * block.z);
  const bool fits = grid.x > 0 && grid.y > 0 && grid.x <= 0x7FFFFFFFu && grid.y <= 65535 && threads > 0 &&
                    threads <= 1024 && block.z == 1 && grid.z == 1 && shared <= (48u << 10);
  if (!fits) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  while (int(fibers.size()) < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.reset(new char[STACK]);
  }
  gridDim = grid, blockDim = block, body = &kernel;
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(order == 0 ? x : grid.x - 1 - x, y);
      dynamic_shared.assign((shared + 15) / 16, {0x7FC00001u, 0x7FC00001u, 0x7FC00001u, 0x7FC00001u});  // NaNs
      run_block(threads);
    }
}

template <class T>
T exchanged(unsigned mask, T value, int (*from)(int, int, int), int argument, int width) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = exchange(mask, bits);
  const int lane = int(threadIdx.x + threadIdx.y * blockDim.x) % WARP, source = from(lane, argument, width);
  if ((mask >> source & 1) == 0) throw std::runtime_error("emulated CUDA: a shuffle reads a thread outside of its mask");
  memcpy(&value, &all[source], sizeof(T));
  return value;
}

}  // namespace zoo_emulator

// c + Σ of four signed bytes of a times those of b.
inline int32_t __dp4a(int32_t a, int32_t b, int32_t c) {
  for (int i = 0; i < 32; i += 8) c += int32_t(int8_t(a >> i)) * int32_t(int8_t(b >> i));
  return c;
}

inline void __syncthreads() { zoo_emulator::wait(zoo_emulator::AT_BARRIER); }
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
      mask, value, [](int lane, int k, int w) { return (lane & (w - 1)) + k < w ? lane + k : lane; }, int(delta), width);
}
inline unsigned __ballot_sync(unsigned mask, int flag) {
  const uint64_t* all = zoo_emulator::exchange(mask, flag != 0);
  unsigned found = 0;
  for (int k = 0; k < 32; ++k)
    if (mask >> k & 1) found |= unsigned(all[k]) << k;
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
