// Which instruction set the CPU kernels use, chosen when the first of them runs.
#pragma once

#include <cstdint>

namespace zoo {

enum Isa : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

Isa isa();  // the one in use

// Calls NAME of the namespace of the instruction set in use. The three are one source, compiled three times.
#if defined(ZOO_X86)
#define ZOO_DISPATCH(NAME, ...)                                     \
  (::zoo::isa() == ::zoo::AVX512 ? ::zoo::avx512::NAME(__VA_ARGS__) \
   : ::zoo::isa() == ::zoo::AVX2 ? ::zoo::avx2::NAME(__VA_ARGS__)   \
                                 : ::zoo::portable::NAME(__VA_ARGS__))
#define ZOO_DECLARE(SIGNATURE) \
  namespace portable {         \
  SIGNATURE;                   \
  }                            \
  namespace avx2 {             \
  SIGNATURE;                   \
  }                            \
  namespace avx512 {           \
  SIGNATURE;                   \
  }
#else
#define ZOO_DISPATCH(NAME, ...) ::zoo::portable::NAME(__VA_ARGS__)
#define ZOO_DECLARE(SIGNATURE) \
  namespace portable {         \
  SIGNATURE;                   \
  }
#endif

}  // namespace zoo

#define ZOO_EXPORT extern "C" __attribute__((visibility("default")))

ZOO_EXPORT int32_t zoo_isa();             // the instruction set in use
ZOO_EXPORT int32_t zoo_best_isa();        // the widest one that this processor runs
ZOO_EXPORT int32_t zoo_use_isa(int32_t);  // returns -1, and changes nothing, for one that this processor does not run
