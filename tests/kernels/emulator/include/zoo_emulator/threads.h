// The threads of one block at a time, a fiber each: they run one after the other and change at barriers and exchanges.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "places.h"
#include "schedule.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#define ZOO_LEAVES(kept, stack, size) __sanitizer_start_switch_fiber(kept, stack, size)
#define ZOO_ARRIVES(kept, stack, size) __sanitizer_finish_switch_fiber(kept, stack, size)
// Those of the C library, and any call that does not return, would make it forget what it knows of the stack.
#define ZOO_JUMPS __attribute__((no_sanitize("address"), noinline))
#define ZOO_STAY(at) __builtin_setjmp(at)
#define ZOO_JUMP(at) __builtin_longjmp(at, 1)
#else
#define ZOO_LEAVES(kept, stack, size)
#define ZOO_ARRIVES(kept, stack, size)
#define ZOO_JUMPS
#define ZOO_STAY(at) _setjmp(at)
#define ZOO_JUMP(at) _longjmp(at, 1)
#endif

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace zoo_emulator {

constexpr size_t STACK = 192 << 10;

#ifdef __SANITIZE_ADDRESS__
using Jump = void* [5];
#else
using Jump = jmp_buf;
#endif

enum State { READY, AT_BARRIER, AT_BARRIER_OF_WARP, AT_EXCHANGE, DONE };

struct Fiber {
  ucontext_t first;  // where it begins
  Jump context;      // where it goes on
  bool begun;
  std::unique_ptr<char[]> stack;
  void* kept;  // by the address sanitizer
  State state;
  int place;             // that it waits at
  unsigned mask;         // of the exchange that it waits for
  uint64_t value;        // what it brings to that
  uint64_t found[WARP];  // what the others brought, of the latest one
};

inline std::vector<std::unique_ptr<Fiber>> fibers;  // kept from launch to launch
inline ucontext_t unused;
inline Jump scheduler;  // swapcontext asks the system twice for each switch, these jumps never do
inline void* kept_of_scheduler;
inline const void* stack_of_scheduler;
inline size_t size_of_scheduler;
inline Fiber* current;
inline int current_thread;
inline const std::function<void()>* body;
inline std::exception_ptr failure;

ZOO_JUMPS inline void run_body() {
  ZOO_ARRIVES(nullptr, &stack_of_scheduler, &size_of_scheduler);
  try {
    (*body)();
  } catch (...) {
    failure = std::current_exception();
  }
  current->state = DONE;
  ZOO_LEAVES(nullptr, stack_of_scheduler, size_of_scheduler);
  ZOO_JUMP(scheduler);
}

ZOO_JUMPS inline void wait(State state) {
  current->state = state;
  current->place = place;
  if (ZOO_STAY(current->context) == 0) {
    ZOO_LEAVES(&current->kept, stack_of_scheduler, size_of_scheduler);
    ZOO_JUMP(scheduler);
  }
  ZOO_ARRIVES(current->kept, &stack_of_scheduler, &size_of_scheduler);
}

inline void barrier(int at) {
  const Change change = arrive(at);
  if (change != TAKEN_AWAY) wait(change == OF_WARP ? AT_BARRIER_OF_WARP : AT_BARRIER);
}

// What each thread of the warp that is in `mask` brings; all of them call it.
inline const uint64_t* exchange(unsigned mask, uint64_t value) {
  current->mask = mask;
  current->value = value;
  if (std::exchange(waits, true)) {
    wait(AT_EXCHANGE);
  } else {
    for (int k = 0; k < WARP; ++k) {
      const size_t other = size_t(current_thread / WARP * WARP + k);
      current->found[k] = other < fibers.size() ? fibers[other]->value : ~uint64_t(0);
    }
  }
  return current->found;
}

ZOO_JUMPS inline void go_on(Fiber& fiber) {
  if (ZOO_STAY(scheduler) == 0) {
    ZOO_LEAVES(&kept_of_scheduler, fiber.stack.get(), STACK);
    if (std::exchange(fiber.begun, true)) ZOO_JUMP(fiber.context);
    swapcontext(&unused, &fiber.first);
  }
  ZOO_ARRIVES(kept_of_scheduler, nullptr, nullptr);
}

inline void start(Fiber& fiber) {
  getcontext(&fiber.first);
  fiber.first.uc_stack = {fiber.stack.get(), 0, STACK};
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, run_body, 0);
  fiber.begun = false;
  fiber.state = READY;
  fiber.value = ~uint64_t(0);
}

[[noreturn]] inline void stuck(const char* what, int thread) {
  throw std::runtime_error("emulated CUDA: thread " + std::to_string(thread) + " of block " +
                           std::to_string(blockIdx.x) + " waits for ever: " + what);
}

inline void run_thread(int t) {
  if (fibers[t]->state != READY) return;
  current = fibers[t].get();
  current_thread = t;
  threadIdx = dim3(unsigned(t) % blockDim.x, unsigned(t) / blockDim.x);
  go_on(*current);
  if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
}

// Lets the threads of the warp from `first` on go whose exchange is complete; whether there were any.
inline bool release_warp(int first, int threads) {
  const int end = std::min(first + WARP, threads);
  bool any = false, all = true;
  for (int t = first; t < end; ++t) all &= fibers[t]->state == AT_BARRIER_OF_WARP || fibers[t]->state == DONE;
  for (int t = first; t < end; ++t) {
    Fiber& fiber = *fibers[t];
    if (fiber.state == AT_BARRIER_OF_WARP && all) fiber.state = READY, any = true;
    if (fiber.state != AT_EXCHANGE) continue;
    const unsigned mask = fiber.mask;
    bool complete = (mask >> (t - first) & 1) != 0;
    for (int k = 0; complete && k < WARP; ++k) {
      if ((mask >> k & 1) == 0) continue;
      complete = first + k < threads;
      if (!complete) break;
      const Fiber& other = *fibers[first + k];
      complete = other.state == AT_EXCHANGE && other.mask == mask && other.place == fiber.place;
    }
    if (!complete) continue;
    uint64_t values[WARP] = {};
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

// Lets all threads go if those that are not done are at one barrier; whether there were any.
inline bool release_block(int threads) {
  int at = -1;
  for (int t = 0; t < threads; ++t) {
    const Fiber& fiber = *fibers[t];
    if (fiber.state == DONE) continue;
    if (fiber.state != AT_BARRIER) return false;
    if (at >= 0 && fiber.place != at) stuck("others are at another barrier", t);
    at = fiber.place;
  }
  for (int t = 0; t < threads; ++t)
    if (fibers[t]->state == AT_BARRIER) fibers[t]->state = READY;
  return at >= 0;
}

inline bool ready(unsigned warp, int threads) {
  for (int t = int(warp) * WARP; t < std::min(int(warp + 1) * WARP, threads); ++t)
    if (fibers[t]->state == READY) return true;
  return false;
}

// All threads that can go on do so, once; whether any exchange is complete then.
inline bool run_round(const std::vector<unsigned>& turns, int threads) {
  for (const unsigned t : turns) run_thread(int(t));
  bool any = false;
  for (int first = 0; first < threads; first += WARP) any |= release_warp(first, threads);
  return any;
}

// Warps go on, one at a time, until the barrier of the block stops all of them.
inline void run_warps(int threads, Dice& dice) {
  const unsigned warps = unsigned(threads + WARP - 1) / WARP;
  unsigned warp = dice.below(warps), stopped = 0;
  while (stopped < warps) {
    if (!ready(warp, threads)) {
      warp = (warp + 1) % warps, ++stopped;
      continue;
    }
    stopped = 0;
    const int first = int(warp) * WARP;
    for (const unsigned lane : arranged(size_t(std::min(WARP, threads - first)), dice)) run_thread(first + int(lane));
    release_warp(first, threads);
    if (order == MIXED || !ready(warp, threads)) warp = dice.below(warps);
  }
}

inline void run_block(int threads, Dice& dice) {
  for (int t = 0; t < threads; ++t) start(*fibers[t]);
  std::vector<unsigned> turns = arranged(size_t(threads), dice);
  while (true) {
    if (order >= AHEAD) run_warps(threads, dice);
    else if (run_round(turns, threads)) continue;
    if (order == OF_INTERVAL) turns = arranged(size_t(threads), dice);
    if (release_block(threads)) continue;
    for (int t = 0; t < threads; ++t) {
      if (fibers[t]->state == AT_BARRIER) stuck("others do not come to its barrier", t);
      if (fibers[t]->state == AT_EXCHANGE) stuck("others do not come to the exchange within its warp", t);
      if (fibers[t]->state == AT_BARRIER_OF_WARP) stuck("others do not come to the barrier of its warp", t);
    }
    return;
  }
}

inline void run_grid(dim3 grid, dim3 block, size_t shared, const std::function<void()>& kernel) {
  const int threads = int(block.x * block.y * block.z);
  while (int(fibers.size()) < threads) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.reset(new char[STACK]);
  }
  gridDim = grid, blockDim = block, body = &kernel;
  const DynamicShared memory(shared);
  Dice dice{seed};
  try {
    for (unsigned y = 0; y < grid.y; ++y)
      for (const unsigned x : arranged(grid.x, dice)) {
        blockIdx = dim3(x, y);
        memory.begin_block();
        run_block(threads, dice);
      }
  } catch (...) {
    fibers.clear();  // some are in the middle of the kernel
    waits = true;
    throw;
  }
}

}  // namespace zoo_emulator
