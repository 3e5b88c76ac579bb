#include "isa.h"

#include <atomic>

#if defined(ZOO_X86)
#include <cpuid.h>
#endif

namespace zoo {
namespace {

Isa best() {
#if defined(ZOO_X86)
  __builtin_cpu_init();
  // The compiler may use any instruction of the flags that a file is compiled with: all of them must be there.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return avx512 ? AVX512 : avx2 ? AVX2 : PORTABLE;
#else
  return PORTABLE;
#endif
}

std::atomic<int32_t>& chosen() {
  static std::atomic<int32_t> value{int32_t(best())};
  return value;
}

#if defined(ZOO_X86)

bool found_dots() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}

bool found_int8_dots() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni");
}

// Not every compiler knows the name of it.
bool found_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d >> 22 & 1) != 0;
}

#else

bool found_dots() { return false; }
bool found_int8_dots() { return false; }
bool found_tiles() { return false; }

#endif

}  // namespace

bool dots_bf16() {
  static const bool found = found_dots();
  return found;
}

bool dots_int8() {
  static const bool found = found_int8_dots();
  return found;
}

bool multiplies_bf16_tiles() {
  static const bool found = found_tiles();
  return found;
}

Isa isa() { return Isa(chosen().load(std::memory_order_relaxed)); }

}  // namespace zoo

int32_t zoo_isa() { return int32_t(zoo::isa()); }

int32_t zoo_best_isa() { return int32_t(zoo::best()); }

int32_t zoo_use_isa(int32_t wanted) {
  if (wanted < 0 || wanted > int32_t(zoo::best())) return -1;
  zoo::chosen().store(wanted, std::memory_order_relaxed);
  return wanted;
}
