// The scalars of a step from numbers in memory, on the CPU. Compiled once for each instruction set.
#include "update.h"

namespace zoo {
namespace ZOO_ISA {

void update_scalars(const Advance& a) {
  if (!make_scalars(a)) return;
  for (int64_t i = 0; i < a.num_steps; ++i) a.steps[i] += 1.0f;
}

}  // namespace ZOO_ISA
}  // namespace zoo
