// What the CUDA version of the update offers: plain C, nothing of torch. Addresses are of device memory, work is on
// `stream`, and what is returned is a cudaError_t.
#pragma once

#include "update.h"

// All rows. -1 if the rule has no such flags.
extern "C" int32_t zoo_update_cuda(int32_t rule, int32_t flags, const zoo::Scalars* scalars, const zoo::Formats* formats,
                                   const zoo::Row* rows, int64_t num_rows, void* stream);

// Pass 1 of LAMB: norms[2·i] = Σp², norms[2·i + 1] = Σd² of row i, with the bits of the CPU. `parts`: two fp64 for each
// part of LAMB_PART elements begun of every row.
extern "C" int32_t zoo_lamb_direction_cuda(int32_t flags, const zoo::Scalars* scalars, const zoo::Formats* formats,
                                           const zoo::Row* rows, int64_t num_rows, double* parts, double* norms,
                                           void* stream);

// Pass 2 of LAMB. `ratios`: the trust ratio of each row, on the device; that of the row itself is not looked at.
extern "C" int32_t zoo_lamb_apply_cuda(int32_t flags, const zoo::Scalars* scalars, const zoo::Formats* formats,
                                       const zoo::Row* rows, int64_t num_rows, const float* ratios, void* stream);
