// Gating on CUDA: a warp a token for the choice, a warp a part of 256 assignments for the places, a block an expert for
// what its key keeps, a block a row otherwise.
#include "../common/blocks.cuh"
#include "../common/device.cuh"
#include "gating.h"

namespace zoo {
namespace {

constexpr int64_t MAX_BLOCKS = 0x7FFFFFFF;  // along x
constexpr uint32_t NAN_BITS = 0x7FC00000u;

// Of a row: M, and e = exp(v - M).
struct Exponentials {
  const void* logits;
  Dtype dtype;
  int64_t first;
  float shift;

  __device__ float v(int64_t i) const { return load(logits, dtype, first + i); }
  __device__ float operator()(int64_t i) const { return exp_of(v(i) - shift); }
};

__device__ Exponentials exponentials(const void* logits, Dtype dtype, int64_t first, int64_t n) {
  float maximum = float_of_bits(0xFF800000u);
  for (int64_t i = threadIdx.x % WARP; i < n; i += WARP) maximum = larger(maximum, load(logits, dtype, first + i));
  for (int half = WARP / 2; half > 0; half /= 2) maximum = larger(maximum, __shfl_xor_sync(ALL, maximum, half));
  return {logits, dtype, first, shift_of(maximum)};
}

__device__ float inverse_sum(const Exponentials& e, int64_t n, const int64_t* index, int64_t k, bool renormalise) {
  if (!renormalise) return inverse_of(warp_sum(n, e));
  float sum = 0.0f;
  for (int64_t j = 0; j < k; ++j) sum += e(index[j]);
  return inverse_of(sum);
}

struct Candidate {
  float value;
  int64_t index;  // -1: none
};

// The order of the choice, with the lower index first among equals.
__device__ bool ahead(const Candidate& a, const Candidate& b) {
  if (a.index < 0 || b.index < 0) return b.index < 0 && a.index >= 0;
  return before(a.value, b.value) || (!before(b.value, a.value) && a.index < b.index);
}

// The first candidate behind `last`, known to all threads of the warp.
__device__ Candidate next_choice(const Exponentials& e, int64_t n, const Candidate& last) {
  Candidate best{0.0f, -1};
  for (int64_t i = threadIdx.x % WARP; i < n; i += WARP) {
    const Candidate mine{e.v(i), i};
    if ((last.index < 0 || ahead(last, mine)) && ahead(mine, best)) best = mine;
  }
  for (int half = WARP / 2; half > 0; half /= 2) {
    const Candidate other{__shfl_xor_sync(ALL, best.value, half), __shfl_xor_sync(ALL, (long long)best.index, half)};
    if (ahead(other, best)) best = other;
  }
  return best;
}

__global__ void gate_kernel(Gate c) {
  const int64_t token = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, n = c.experts, k = c.choices;
  if (token >= c.tokens) return;
  const int t = threadIdx.x % WARP;
  const Exponentials e = exponentials(c.logits, c.dtype, token * n, n);
  int64_t* index = c.indices + token * k;
  Candidate last{0.0f, -1};
  for (int64_t j = 0; j < k; ++j) {
    last = next_choice(e, n, last);
    if (t == 0) index[j] = last.index;
  }
  __syncwarp();  // index was written by one thread
  const float inverse = inverse_sum(e, n, index, k, c.renormalise);
  for (int64_t j = t; j < k; j += WARP) c.probabilities[token * k + j] = e(index[j]) * inverse;
}

__global__ void gate_backward_kernel(GateBackward c) {
  const int64_t token = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, n = c.experts, k = c.choices;
  if (token >= c.tokens) return;
  const Exponentials e = exponentials(c.logits, c.dtype, token * n, n);
  const int64_t* index = c.indices + token * k;
  const float* dw = c.grad_probabilities + token * k;
  bool inside = true;
  for (int64_t j = 0; j < k; ++j) inside &= index[j] >= 0 && index[j] < n;
  if (!inside) {
    for (int64_t i = threadIdx.x % WARP; i < n; i += WARP)
      store(c.grad_logits, c.dtype, token * n + i, float_of_bits(NAN_BITS));
    return;
  }
  const float inverse = inverse_sum(e, n, index, k, c.renormalise);
  float dot = 0.0f;
  for (int64_t j = 0; j < k; ++j) dot += dw[j] * (e(index[j]) * inverse);
  for (int64_t i = threadIdx.x % WARP; i < n; i += WARP) {
    float g = 0.0f;
    bool chosen = false;
    for (int64_t j = 0; j < k; ++j) {
      if (index[j] != i) continue;
      g += dw[j];
      chosen = true;
    }
    const float p = (c.renormalise && !chosen ? 0.0f : e(i)) * inverse;
    store(c.grad_logits, c.dtype, token * n + i, gate_grad(p, g, dot));
  }
}

// A warp goes through its part in the order of priority, 32 assignments at a time; taken[part·E + e] counts those to e.
// The first round fills it from 0; the second, after the scan, starts from what earlier parts took, and writes the
// places.
template <bool WRITE>
__global__ void places_kernel(Places c, int64_t* taken, int64_t parts) {
  const int64_t part = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, total = c.tokens * c.choices;
  if (part >= parts) return;
  const int t = threadIdx.x % WARP;
  int64_t* mine = taken + part * c.experts;
  for (int64_t s = part * PLACES_PART; s < (part + 1) * PLACES_PART && s < total; s += WARP) {
    const bool here = s + t < total;
    const int64_t at = here ? assignment(c, s + t) : 0;
    const long long e = here ? c.indices[at] : -1;
    const bool valid = e >= 0 && e < c.experts;
    const unsigned same = __match_any_sync(ALL, valid ? e : -1LL);
    const int64_t rank = __popc(same & ((1u << t) - 1u)), base = valid ? mine[e] : 0;
    if (WRITE && here) c.positions[at] = valid ? place_of(base + rank, capacity_in_order(c)) : -1;
    __syncwarp();  // all have read before one of each expert writes
    if (valid && rank == 0) mine[e] = base + __popc(same);
    __syncwarp();
  }
}

__global__ void scan_kernel(Places c, int64_t* taken, int64_t parts) {
  const int64_t e = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (e >= c.experts) return;
  int64_t sum = 0;
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t mine = taken[p * c.experts + e];
    taken[p * c.experts + e] = sum;
    sum += mine;
  }
  c.demand[e] = sum;
  c.counts[e] = count_of(sum, c.capacity);
}

// first_e = assignments to the experts before e; one warp.
__global__ void first_kernel(const int64_t* demand, int64_t experts, int64_t* first) {
  const int t = threadIdx.x;
  int64_t sum = 0;
  for (int64_t begin = 0; begin < experts; begin += WARP) {
    const int64_t mine = begin + t < experts ? demand[begin + t] : 0;
    int64_t up_to_me = mine;
    for (int step = 1; step < WARP; step *= 2) {
      const int64_t other = __shfl_up_sync(ALL, (long long)up_to_me, step);
      if (t >= step) up_to_me += other;
    }
    if (begin + t < experts) first[begin + t] = sum + up_to_me - mine;
    sum += __shfl_sync(ALL, (long long)up_to_me, WARP - 1);
  }
}

// order[first_e ...]: where the assignments to e are, in the order of priority; of experts with more than they keep.
__global__ void group_kernel(Places c, const int64_t* first, int64_t* order) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= c.tokens * c.choices) return;
  const int64_t e = c.indices[at];
  if (e < 0 || e >= c.experts || c.demand[e] <= c.capacity) return;
  order[first[e] + c.positions[at]] = at;
}

struct Threshold {
  uint32_t key;  // the least that is kept
  int64_t ties;  // how many of those that are equal to it
};

// The C-th greatest of n keys by its digits of 8 bits, the highest first; known to all threads of the block.
__device__ Threshold threshold_of(const Places& c, const int64_t* at, int64_t n) {
  __shared__ unsigned long long counts[THREADS];  // a thread a digit
  __shared__ uint32_t digit;
  __shared__ long long left;
  static_assert(THREADS == 256, "a digit has 8 bits");
  uint32_t prefix = 0;
  int64_t wanted = c.capacity;  // of the keys that begin with the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    counts[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
      const uint32_t key = key_of(c, at[i]);
      if (uint64_t(key) >> (shift + 8) == prefix) atomicAdd(&counts[key >> shift & 255u], 1ull);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int d = 255;
      for (; d > 0 && int64_t(counts[d]) < wanted; --d) wanted -= int64_t(counts[d]);
      digit = uint32_t(d);
      left = wanted;
    }
    __syncthreads();
    prefix = prefix << 8 | digit;
    wanted = left;
  }
  return {prefix, wanted};  // with a capacity of 0: no NaN
}

struct Rank {
  int before_me, all;
};

// Among the threads of the block whose flag is set.
__device__ Rank rank_of(bool flag) {
  __shared__ int of_warps[THREADS / WARP];
  const int t = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  const unsigned mask = __ballot_sync(ALL, flag);
  __syncthreads();  // all have read those of the call before
  if (t == 0) of_warps[warp] = __popc(mask);
  __syncthreads();
  Rank rank{__popc(mask & ((1u << t) - 1u)), 0};
  for (int w = 0; w < THREADS / WARP; ++w) {
    if (w < warp) rank.before_me += of_warps[w];
    rank.all += of_warps[w];
  }
  return rank;
}

// The places of an expert with more assignments than it keeps, among those that it keeps by their keys.
__global__ void keep_kernel(Places c, const int64_t* first, const int64_t* order) {
  const int64_t e = blockIdx.x, n = c.demand[e];
  if (n <= c.capacity) return;
  const int64_t* mine = order + first[e];
  const Threshold least = threshold_of(c, mine, n);
  int64_t place = 0, ties = least.ties;
  for (int64_t begin = 0; begin < n; begin += THREADS) {
    const int64_t i = begin + threadIdx.x, at = i < n ? mine[i] : 0;
    const uint32_t key = i < n ? key_of(c, at) : 0;
    const bool equal = i < n && key == least.key;
    const Rank tie = rank_of(equal);
    const bool kept = i < n && (key > least.key || (equal && tie.before_me < ties));
    const Rank rank = rank_of(kept);
    if (i < n) c.positions[at] = kept ? place + rank.before_me : -1;
    ties -= tie.all;
    place += rank.all;
  }
}

__global__ void invert_kernel(const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source) {
  const int64_t s = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (s >= n || rows[s] < 0 || rows[s] >= num_rows) return;
  // The least number stays, whoever comes first; -1 is the greatest one without a sign.
  atomicMin(reinterpret_cast<unsigned long long*>(source + rows[s]), static_cast<unsigned long long>(s));
}

// Words of 16 bytes where the length and both addresses allow it, else of 2: all formats are whole numbers of those.
__global__ void permute_kernel(Permute c) {
  const int64_t row = blockIdx.x, at = c.source[row];
  char* to = static_cast<char*>(c.y) + row * c.row_bytes;
  const char* from = at < 0 ? nullptr : static_cast<const char*>(c.x) + at / c.choices * c.row_bytes;
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(c.row_bytes)) & 15) == 0) {
    for (int64_t i = threadIdx.x; i < c.row_bytes / 16; i += blockDim.x)
      reinterpret_cast<uint4*>(to)[i] = at < 0 ? uint4{} : reinterpret_cast<const uint4*>(from)[i];
    return;
  }
  for (int64_t i = threadIdx.x; i < c.row_bytes / 2; i += blockDim.x)
    reinterpret_cast<uint16_t*>(to)[i] = at < 0 ? uint16_t(0) : reinterpret_cast<const uint16_t*>(from)[i];
}

__device__ int remaining(int64_t i, int64_t n) { return n - i < 4 ? int(n - i) : 4; }

__global__ void unpermute_kernel(Unpermute c) {
  const int64_t token = blockIdx.x, n = c.dim;
  for (int64_t i = int64_t(threadIdx.x) * 4; i < n; i += int64_t(blockDim.x) * 4) {
    Four sum = {};
    for (int64_t j = 0; j < c.choices; ++j) {
      const int64_t row = c.rows[token * c.choices + j];
      if (row == -1) continue;
      if (row < 0 || row >= c.num_rows) {
        for (int m = 0; m < 4; ++m) sum.x[m] = float_of_bits(NAN_BITS);
        continue;
      }
      const Four y = load4(c.y, c.dtype, row * n + i, remaining(i, n));
      if (c.weights == nullptr) {
        for (int m = 0; m < 4; ++m) sum.x[m] += y.x[m];
      } else {
        const float w = load(c.weights, c.weight_dtype, token * c.choices + j);
        for (int m = 0; m < 4; ++m) sum.x[m] += w * y.x[m];
      }
    }
    store4(sum, c.out, c.dtype, token * n + i, remaining(i, n));
  }
}

// A warp a row: both the copy and the lane sum of dw.
__global__ void unpermute_backward_kernel(UnpermuteBackward c) {
  const int64_t row = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP, n = c.dim;
  if (row >= c.rows) return;
  const int t = threadIdx.x % WARP;
  const int64_t at = c.source[row], token = at < 0 ? 0 : at / c.choices;
  const float w = at < 0 ? 0.0f : load(c.weights, c.weight_dtype, at);
  const auto g = [&](int64_t i) { return load(c.grad_out, c.dtype, token * n + i); };
  for (int64_t i = t; i < n; i += WARP) store(c.grad_y, c.dtype, row * n + i, at < 0 ? 0.0f : w * g(i));
  if (at < 0) return;
  const float dw = warp_sum(n, [&](int64_t i) { return g(i) * load(c.y, c.dtype, row * n + i); });
  if (t == 0) store(c.grad_weights, c.weight_dtype, at, dw);
}

}  // namespace

namespace cuda {

int32_t top_k_gate(const Gate& c, void* stream) {
  if (c.tokens == 0) return cudaSuccess;
  gate_kernel<<<blocks_for(c.tokens, WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t top_k_gate_backward(const GateBackward& c, void* stream) {
  if (c.tokens == 0) return cudaSuccess;
  gate_backward_kernel<<<blocks_for(c.tokens, WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t positions_in_expert(const Places& c, int64_t* taken, int64_t* order, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t parts = ceil_div(c.tokens * c.choices, PLACES_PART);
  if (parts > 0) {
    const cudaError_t error = cudaMemsetAsync(taken, 0, size_t(parts * c.experts) * sizeof(int64_t), s);
    if (error != cudaSuccess) return error;
    places_kernel<false><<<blocks_for(parts, WARPS), WARP * WARPS, 0, s>>>(c, taken, parts);
  }
  scan_kernel<<<blocks_for(c.experts, THREADS), THREADS, 0, s>>>(c, taken, parts);
  if (parts > 0) places_kernel<true><<<blocks_for(parts, WARPS), WARP * WARPS, 0, s>>>(c, taken, parts);
  if (parts > 0 && c.key != nullptr && c.capacity >= 0) {
    if (c.experts > MAX_BLOCKS) return cudaErrorInvalidValue;
    int64_t *first = order, *grouped = order + c.experts;
    first_kernel<<<1, WARP, 0, s>>>(c.demand, c.experts, first);
    group_kernel<<<blocks_for(c.tokens * c.choices, THREADS), THREADS, 0, s>>>(c, first, grouped);
    keep_kernel<<<unsigned(c.experts), THREADS, 0, s>>>(c, first, grouped);
  }
  return cudaGetLastError();
}

int32_t invert_rows(const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  if (num_rows == 0) return cudaSuccess;
  const cudaError_t error = cudaMemsetAsync(source, 0xFF, size_t(num_rows) * sizeof(int64_t), s);  // -1
  if (error != cudaSuccess) return error;
  if (n > 0) invert_kernel<<<blocks_for(n, THREADS), THREADS, 0, s>>>(rows, n, num_rows, source);
  return cudaGetLastError();
}

int32_t permute(const Permute& c, void* stream) {
  if (c.rows == 0 || c.row_bytes == 0) return cudaSuccess;
  if (c.rows > MAX_BLOCKS) return cudaErrorInvalidValue;
  permute_kernel<<<unsigned(c.rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t unpermute(const Unpermute& c, void* stream) {
  if (c.tokens == 0 || c.dim == 0) return cudaSuccess;
  if (c.tokens > MAX_BLOCKS) return cudaErrorInvalidValue;
  unpermute_kernel<<<unsigned(c.tokens), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t unpermute_backward(const UnpermuteBackward& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const size_t bytes = size_t(c.tokens * c.choices) * (c.weight_dtype == F32 ? 4 : 2);
  const cudaError_t error = bytes == 0 ? cudaSuccess : cudaMemsetAsync(c.grad_weights, 0, bytes, s);
  if (error != cudaSuccess || c.rows == 0) return error;
  unpermute_backward_kernel<<<blocks_for(c.rows, WARPS), WARP * WARPS, 0, s>>>(c);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
