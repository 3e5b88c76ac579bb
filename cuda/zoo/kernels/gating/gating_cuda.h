// What the CUDA version of gating offers: plain C, nothing of torch. Addresses are of device memory, work is on `stream`,
// and what is returned is a cudaError_t.
//
// What the CPU's binding refuses by the values of indices and rows does no harm here, and shows: no address outside of
// the tensors is touched, and a token with an index of no expert gets a gradient of NaN; such an assignment gets the
// place -1 and is not in the demand. A row out of range is left out of `source`, so nothing goes there; unpermute makes
// its token NaN. Of several assignments with one row the first stays in `source`.
#pragma once

#include "gating.h"

extern "C" int32_t zoo_top_k_gate_cuda(const zoo::Gate* c, void* stream);
extern "C" int32_t zoo_top_k_gate_backward_cuda(const zoo::GateBackward* c, void* stream);

// `taken`: E numbers for each PLACES_PART assignments begun. `order`: E + T·k numbers, read and written only where there are
// a key and a capacity.
extern "C" int32_t zoo_positions_in_expert_cuda(const zoo::Places* c, int64_t* taken, int64_t* order, void* stream);

// source (R,), which permute and the backward of unpermute read, from rows (n = T·k,).
extern "C" int32_t zoo_invert_rows_cuda(const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source, void* stream);

// The rows of `y` and the tokens are at most 2^31 - 1.
extern "C" int32_t zoo_permute_cuda(const zoo::Permute* c, void* stream);
extern "C" int32_t zoo_unpermute_cuda(const zoo::Unpermute* c, void* stream);
extern "C" int32_t zoo_unpermute_backward_cuda(const zoo::UnpermuteBackward* c, void* stream);

namespace zoo {

constexpr int64_t PLACES_PART = 256;  // assignments that one warp counts: eight steps

}  // namespace zoo
