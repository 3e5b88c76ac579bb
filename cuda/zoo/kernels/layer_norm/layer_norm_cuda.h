// What the CUDA version of layer normalisation offers: plain C, nothing of torch. Addresses are of device memory, work is
// on `stream`, and what is returned is a cudaError_t.
#pragma once

#include "layer_norm.h"

extern "C" int32_t zoo_layer_norm_cuda(const zoo::LayerNorm* c, void* stream);

// `parts`: 2·D floats for each 64 rows begun. D is at most 16,776,960.
extern "C" int32_t zoo_layer_norm_backward_cuda(const zoo::LayerNormBackward* c, float* parts, void* stream);
