// Attention of queries over keys and values that are there, whose sums depend on nothing but what a query sees.
//
// Of query (b, h, t) and the keys i = 0, 1, ... that it sees, in their order, of the group h / (H / G):
//   s_i = c·(Σ_d q_d k_{i,d})    M = max s    e_i = exp(s_i - M)    S = Σ e_i    y_d = (Σ_i e_i v_{i,d})·(1/S)
// (Vaswani et al. 2017, section 3.2.1). It sees key j where the mask is true; without a mask where j <= n - T + t: the
// last query sees all. A query that sees none has y = 0.
//
// Arithmetic is fp32, y rounded once. The sum over d is a dot product of common/dots.h, S a lane sum of common/lanes.h;
// the sum over i is made of fused multiply-adds, in the order of i, from zero; exp is that of common/elementary.h. So
// the bits of y are a function of q and of the keys and values that it sees: keys that it does not see, as of padding,
// the other queries and rows, where the cache lies, the threads and the instruction set change none, and CUDA and
// reference.py give the same.
//
// Memory contract. q (B, H, T, D), keys and values (B, G, n, D), of one format; each of any strides, but D is
// contiguous. mask (B, T, n), of any strides. y (B, T, H·D), contiguous. G divides H. Scratch of a thread: n + D
// numbers, with a mask n indices besides.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   cached_attention_kernel 128 threads, <= 64 registers, >= 32 warps
// A block has a query; its scores, and with a mask the indices, are n numbers in memory for each query.
#pragma once

#include "../common/isa.h"

namespace zoo {

// From one batch row, head or group, and token or key to the next one.
struct Steps {
  int64_t row, head, token;
};

struct CachedAttention {
  const void *q, *keys, *values;
  const bool* mask;  // null: causal
  void* y;
  int64_t batch, heads, groups, tokens, length, dim;  // B, H, G, T, n, D
  Steps of_q, of_keys, of_values;
  int64_t mask_row, mask_token, mask_key;  // steps
  float scale;
  Dtype dtype;
};

ZOO_CPU_KERNEL(cached_attention, const CachedAttention& c)
// scores: n numbers, indices: n with a mask, for each of the B·H·T queries.
ZOO_CUDA_KERNEL(cached_attention, const CachedAttention& c, float* scores, int32_t* indices)

}  // namespace zoo
