// What the CPU version of activations offers to the binding.
#pragma once

#include "../common/isa.h"
#include "activation.h"

namespace zoo {

// Rows [begin, end).
ZOO_DECLARE(void activation_rows(const Activation& c, int64_t begin, int64_t end))
ZOO_DECLARE(void activation_backward_rows(const Activation& c, int64_t begin, int64_t end))

void activation_cpu(const Activation& c);
void activation_backward_cpu(const Activation& c);

}  // namespace zoo
