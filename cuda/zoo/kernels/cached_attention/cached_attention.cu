// Attention over a cache on CUDA: a block has a query. A thread has a key at a time for the scores, and a number of a
// head at a time for y.
#include "cached_attention.h"

#include "../common/device.cuh"
#include "../common/elementary.h"
#include "../common/rows.cuh"

namespace zoo {
namespace {

constexpr int QUERY_THREADS = 128;
constexpr int DOT = 16;  // lanes of a dot product

// The keys that the mask shows, in their order; how many they are.
__device__ int64_t show(const CachedAttention& c, const bool* mask, int32_t* indices) {
  __shared__ int32_t counts[QUERY_THREADS + 1];
  const int64_t each = ceil_div(c.length, QUERY_THREADS), begin = threadIdx.x * each;
  const int64_t end = begin + each < c.length ? begin + each : c.length;
  int32_t mine = 0;
  for (int64_t j = begin; j < end; ++j) mine += mask[j * c.mask_key] ? 1 : 0;
  counts[threadIdx.x + 1] = mine;
  __syncthreads();
  if (threadIdx.x == 0) {
    counts[0] = 0;
    for (int i = 0; i < QUERY_THREADS; ++i) counts[i + 1] += counts[i];
  }
  __syncthreads();
  int32_t at = counts[threadIdx.x];
  for (int64_t j = begin; j < end; ++j)
    if (mask[j * c.mask_key]) indices[at++] = int32_t(j);
  return counts[QUERY_THREADS];
}

__device__ __forceinline__ float dot_of(const CachedAttention& c, int64_t q, int64_t key) {
  float lanes[DOT] = {};
  for (int64_t d = 0; d < c.dim; d += DOT)
#pragma unroll
    for (int l = 0; l < DOT; ++l)
      if (d + l < c.dim) lanes[l] = fmaf(load(c.keys, c.dtype, key + d + l), load(c.q, c.dtype, q + d + l), lanes[l]);
#pragma unroll
  for (int half = DOT / 2; half > 0; half /= 2)
#pragma unroll
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

__global__ void __launch_bounds__(QUERY_THREADS)
    cached_attention_kernel(CachedAttention c, float* all_scores, int32_t* all_indices) {
  const int64_t query = blockIdx.x, h = query % c.heads, t = query / c.heads % c.tokens;
  const int64_t b = query / c.heads / c.tokens, g = h / (c.heads / c.groups);
  float* const scores = all_scores + query * c.length;
  int32_t* const indices = all_indices == nullptr ? nullptr : all_indices + query * c.length;
  const int64_t seen = c.length - c.tokens + t + 1;
  int64_t count = seen < 0 ? 0 : seen;
  if (c.mask != nullptr) count = show(c, c.mask + b * c.mask_row + t * c.mask_token, indices);
  __syncthreads();
  const int64_t q = b * c.of_q.row + h * c.of_q.head + t * c.of_q.token;
  const int64_t keys = b * c.of_keys.row + g * c.of_keys.head, values = b * c.of_values.row + g * c.of_values.head;
  float most = -INFINITY;
  for (int64_t i = threadIdx.x; i < count; i += QUERY_THREADS) {
    const int64_t key = indices == nullptr ? i : indices[i];
    scores[i] = dot_of(c, q, keys + key * c.of_keys.token) * c.scale;
    most = larger(most, scores[i]);
  }
  most = block_maximum(most);
  for (int64_t i = threadIdx.x; i < count; i += QUERY_THREADS) scores[i] = exp_of(scores[i] - most);
  float sums[1];
  LaneSums<1> of_e;
  of_e.add(count, [&](int, int64_t i) { return scores[i]; });
  of_e.fold(sums);
  const float factor = count == 0 ? 0.0f : __fdiv_rn(1.0f, sums[0]);
  for (int64_t d = threadIdx.x; d < c.dim; d += QUERY_THREADS) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = indices == nullptr ? i : indices[i];
      sum = fmaf(scores[i], load(c.values, c.dtype, values + key * c.of_values.token + d), sum);
    }
    store(c.y, c.dtype, query * c.dim + d, sum * factor);
  }
}

}  // namespace

namespace cuda {

int32_t cached_attention(const CachedAttention& c, float* scores, int32_t* indices, void* stream) {
  const int64_t queries = c.batch * c.heads * c.tokens;
  if (queries == 0) return cudaSuccess;
  if (queries > MAX_ROWS) return cudaErrorInvalidValue;
  cached_attention_kernel<<<unsigned(queries), QUERY_THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c, scores,
                                                                                                      indices);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
