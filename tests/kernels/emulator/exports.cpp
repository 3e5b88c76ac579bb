// What tests call of the library besides its operators.
#include "common/divider.h"
#include "cuda_runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void zoo_emulator_order(int order) { zoo_emulator::order = order; }

EXPORT uint32_t zoo_quotient(uint32_t a, uint32_t b) { return zoo::Divider(b).quotient(a); }

EXPORT uint32_t zoo_rest(uint32_t a, uint32_t b) { return zoo::Divider(b).rest(a); }
