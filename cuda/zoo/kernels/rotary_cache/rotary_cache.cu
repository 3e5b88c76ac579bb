// Rotary positions and the cache on CUDA: a block a token, a thread a pair of numbers of a head.
#include "rotary_cache.h"

#include "../common/device.cuh"

namespace zoo {
namespace {

constexpr int PAIRS = 128;  // threads

__global__ void __launch_bounds__(PAIRS) rotary_cache_kernel(RotaryCache c) {
  const int64_t token = blockIdx.x, b = token / c.tokens, t = token % c.tokens;
  const int64_t table = (b * c.table_step + t) * c.rotary, first = token * c.width();
  const int64_t place = !c.cached ? 0 : c.places[b * c.place_step + t];
  const bool fits = place >= 0 && place < c.room;
  const int64_t half = c.rotary / 2, pairs = half + (c.dim - c.rotary), heads = c.q_heads + 2 * c.kv_heads;
  for (int64_t at = threadIdx.x; at < heads * pairs; at += PAIRS) {
    const int64_t head = at / pairs, pair = at % pairs, from = first + head * c.dim;
    const bool is_q = head < c.q_heads, is_v = head >= c.q_heads + c.kv_heads;
    void* to = c.qkv;
    int64_t begin = from;
    if (!is_q && c.cached) {
      if (!fits) continue;
      to = is_v ? c.values : c.keys;
      begin = ((b * c.kv_heads + (head - c.q_heads) % c.kv_heads) * c.room + place) * c.dim;
    } else if (is_v) {
      continue;
    }
    if (pair >= half) {  // beyond R
      const int64_t i = c.rotary + pair - half;
      if (to != c.qkv) store(to, c.dtype, begin + i, load(c.qkv, c.dtype, from + i));
      continue;
    }
    const int64_t i = c.interleaved ? 2 * pair : pair, j = c.interleaved ? i + 1 : i + half;
    const float x = load(c.qkv, c.dtype, from + i), y = load(c.qkv, c.dtype, from + j);
    if (is_v) {
      store(to, c.dtype, begin + i, x);
      store(to, c.dtype, begin + j, y);
      continue;
    }
    const float cos_i = load(c.cos, c.table_dtype, table + i), sin_i = load(c.sin, c.table_dtype, table + i);
    const float cos_j = load(c.cos, c.table_dtype, table + j), sin_j = load(c.sin, c.table_dtype, table + j);
    store(to, c.dtype, begin + i, x * cos_i - y * sin_i);
    store(to, c.dtype, begin + j, y * cos_j + x * sin_j);
  }
}

}  // namespace

namespace cuda {

int32_t rotary_cache(const RotaryCache& c, void* stream) {
  const int64_t tokens = c.batch * c.tokens;
  if (tokens == 0) return cudaSuccess;
  if (tokens > MAX_ROWS) return cudaErrorInvalidValue;
  rotary_cache_kernel<<<unsigned(tokens), PAIRS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
