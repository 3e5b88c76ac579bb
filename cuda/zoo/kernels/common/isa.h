// Kernels: how a header declares one for both devices, and which of the three of a CPU runs.
#pragma once

#include "numbers.h"

// The kernel NAME(...) on CPUs: one source, compiled for each instruction set into a namespace of its name.
#define ZOO_CPU_KERNEL(NAME, ...) \
  namespace portable {            \
  void NAME(__VA_ARGS__);         \
  }                               \
  namespace avx2 {                \
  void NAME(__VA_ARGS__);         \
  }                               \
  namespace avx512 {              \
  void NAME(__VA_ARGS__);         \
  }

// The same on CUDA: addresses are of device memory, work is on `stream`, and what is returned is a cudaError_t.
#define ZOO_CUDA_KERNEL(NAME, ...)         \
  namespace cuda {                         \
  int32_t NAME(__VA_ARGS__, void* stream); \
  }

#define ZOO_KERNEL(NAME, ...)       \
  ZOO_CPU_KERNEL(NAME, __VA_ARGS__) \
  ZOO_CUDA_KERNEL(NAME, __VA_ARGS__)

// Calls NAME of the namespace of the instruction set in use.
#if defined(ZOO_X86)
#define ZOO_DISPATCH(NAME, ...)                                     \
  (::zoo::isa() == ::zoo::AVX512 ? ::zoo::avx512::NAME(__VA_ARGS__) \
   : ::zoo::isa() == ::zoo::AVX2 ? ::zoo::avx2::NAME(__VA_ARGS__)   \
                                 : ::zoo::portable::NAME(__VA_ARGS__))
#else
#define ZOO_DISPATCH(NAME, ...) ::zoo::portable::NAME(__VA_ARGS__)
#endif

namespace zoo {

enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

Isa isa();                     // the one in use
bool dots_bf16();              // this processor has AVX-512 BF16 and VBMI
bool dots_int8();              // this processor has AVX-512 VNNI
bool multiplies_bf16_tiles();  // this processor has AMX BF16

}  // namespace zoo

#define ZOO_EXPORT extern "C" __attribute__((visibility("default")))

ZOO_EXPORT int32_t zoo_isa();             // the instruction set in use
ZOO_EXPORT int32_t zoo_best_isa();        // the widest one that this processor runs
ZOO_EXPORT int32_t zoo_use_isa(int32_t);  // returns -1, and changes nothing, for one that this processor does not run
