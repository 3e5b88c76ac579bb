// What the CUDA version of the update offers: plain C, nothing of torch.
#pragma once

#include "update.h"

// All rows on `stream`; addresses are of device memory. Returns a cudaError_t, or -1 if the rule has no such flags.
extern "C" __attribute__((visibility("default"))) int32_t zoo_update_cuda(
    int32_t rule, int32_t flags, const zoo::Scalars* scalars, const zoo::Formats* formats, const zoo::Row* rows,
    int64_t num_rows, void* stream);
