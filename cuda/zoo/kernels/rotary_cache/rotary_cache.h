// Rotary positions (Su et al. 2021, "RoFormer", equation 34) of q and k, and k and v written into the cache.
//
// Of each token (b, t), whose q, k and v lie side by side as heads of D numbers, and of i < R:
//   x_i <- x_i·cos_i - x_j·sin_i   where i is the first of its pair, j the second
//   x_i <- x_i·cos_i + x_j·sin_i   where i is the second, j the first
// Pairs are (i, i + R/2), or (2i, 2i + 1): interleaved. Numbers i >= R stay. q is rotated where it is. Of k and v:
// with a cache, rotated k and v go to its slot `place` of the row b, and where they lie they stay as they are; a place
// outside of the cache takes nothing. Without a cache k is rotated where it is.
//
// Arithmetic is fp32, every operation rounded by itself as written, and the result once. So every instruction set, any
// number of threads, CUDA and reference.py give the same bits, and a token's depend on its own numbers alone.
//
// Memory contract. qkv (B, T, (H + 2 G)·D), H heads of q and G of k and of v; cos and sin (B or 1, T, R), of one
// format; keys and values (B, G, S, D), of the format of qkv; places (B or 1, T), int64. All contiguous. R even, <= D.
// Reads and writes q once, reads k and v and writes them once.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   rotary_cache_kernel 128 threads, <= 48 registers, >= 40 warps
#pragma once

#include "../common/isa.h"

namespace zoo {

struct RotaryCache {
  void* qkv;
  const void *cos, *sin;
  void *keys, *values;
  const int64_t* places;
  int64_t batch, tokens, q_heads, kv_heads, dim, rotary, room;
  int64_t table_step, place_step;  // from a row to the next one: 0 where one serves all
  Dtype dtype, table_dtype;
  bool interleaved, cached;

  ZOO_HD int64_t width() const { return (q_heads + 2 * kv_heads) * dim; }
};

ZOO_KERNEL(rotary_cache, const RotaryCache& c)

}  // namespace zoo
