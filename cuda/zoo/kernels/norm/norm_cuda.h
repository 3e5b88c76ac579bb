// What the CUDA version of the norm offers: plain C, nothing of torch.
#pragma once

#include "norm.h"

// All rows on `stream`; addresses are of device memory. `parts`: one fp64 for each part of 65,536 elements begun of every
// row (norm_parts); `sums`: one for each row. Returns a cudaError_t.
extern "C" int32_t zoo_scale_norm_cuda(const zoo::NormRow* rows, int64_t num_rows, int32_t dtype, float factor,
                                       double* parts, double* sums, void* stream);
