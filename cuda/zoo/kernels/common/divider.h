// Division by a number that is known before a kernel starts, without dividing in it (Granlund and Montgomery 1994,
// "Division by invariant integers using multiplication"): ⌊a/b⌋ = ⌊a·m/2^64⌋ with m = ⌈2^64/b⌉, for a and 1 < b below
// 2^32. m·b is above 2^64 by less than b, so a·m/2^64 is above a/b by less than a/2^64, which is less than the 1/b that
// the next integer is away at least.
#pragma once

#include "numbers.h"

namespace zoo {
inline namespace ZOO_ISA {

class Divider {
 public:
  explicit Divider(uint64_t by) : by_(by), inverse_(by == 1 ? 0 : ~uint64_t(0) / by + 1) {}

  ZOO_HD uint32_t quotient(uint32_t a) const {
    if (by_ == 1) return a;
#if defined(__CUDA_ARCH__)
    return uint32_t(__umul64hi(inverse_, a));
#else
    return uint32_t((static_cast<unsigned __int128>(inverse_) * a) >> 64);
#endif
  }

  ZOO_HD uint32_t rest(uint32_t a) const { return uint32_t(a - quotient(a) * by_); }

 private:
  uint64_t by_, inverse_;
};

}  // namespace ZOO_ISA
}  // namespace zoo
