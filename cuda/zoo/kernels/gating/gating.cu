// Gating on CUDA: a warp a token for the choice, a block a part of 256 assignments for the places, a warp an expert for
// their sums, a block an expert for what its key keeps, a block a row otherwise.
//
// What a loop reads does not depend on what it has just written, and is asked for several steps at a time.
#include "../common/matrix.cuh"
#include "../common/rows.cuh"
#include "gating.h"

namespace zoo {
namespace {

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
  const float all = c.renormalise ? 0.0f : warp_sum(n, e);
  // Thread j mod 32 has choice j: the e of the first 32 in a register, of others where its probability will be.
  float mine = 0.0f, sum = 0.0f;
  Candidate last{0.0f, -1};
  for (int64_t j = 0; j < k; ++j) {
    last = next_choice(e, n, last);
    const float chosen = exp_of(last.value - e.shift);
    sum += chosen;
    if (j % WARP != t) continue;
    c.indices[token * k + j] = last.index;
    if (j < WARP) mine = chosen;
    else c.probabilities[token * k + j] = chosen;
  }
  const float inverse = inverse_of(c.renormalise ? sum : all);
  if (t < k) c.probabilities[token * k + t] = mine * inverse;
  for (int64_t j = t + WARP; j < k; j += WARP) c.probabilities[token * k + j] *= inverse;
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

// A block has a part, a thread an assignment of it, in the order of priority: its place is the number of those of its
// expert in earlier parts, which the scan has made of taken[e·parts + part], and of those before it in the part, which
// are counted here. The first round writes what the part has of each expert, the second the places.
template <bool WRITE>
__global__ void __launch_bounds__(THREADS) places_kernel(Places c, int64_t* __restrict__ taken, int64_t parts) {
  static_assert(THREADS == PLACES_PART, "a thread an assignment");
  __shared__ int experts[THREADS];
  const int64_t total = c.tokens * c.choices, s = blockIdx.x * PLACES_PART + threadIdx.x;
  const int64_t at = s < total ? assignment(c, s) : 0, e = s < total ? c.indices[at] : -1;
  const bool valid = e >= 0 && e < c.experts;
  const int mine = valid ? int(e) : -1;
  experts[threadIdx.x] = mine;
  __syncthreads();
  int before_me = 0, all = 0;
#pragma unroll 8
  for (int i = 0; i < THREADS; ++i) {
    const bool same = experts[i] == mine;
    all += same;
    before_me += same && i < int(threadIdx.x);
  }
  if (WRITE && s < total)
    c.positions[at] = valid ? place_of(taken[e * parts + blockIdx.x] + before_me, capacity_in_order(c)) : -1;
  if (!WRITE && valid && before_me == 0) taken[e * parts + blockIdx.x] = all;
}

// Of the numbers of each expert's parts the sums of those before; a warp an expert, a thread four parts at a time.
__global__ void scan_kernel(Places c, int64_t* __restrict__ taken, int64_t parts) {
  constexpr int EACH = 4;
  const int64_t e = int64_t(blockIdx.x) * WARPS + threadIdx.x / WARP;
  if (e >= c.experts) return;
  const int t = threadIdx.x % WARP;
  int64_t* const mine = taken + e * parts;
  int64_t sum = 0;
  for (int64_t begin = 0; begin < parts; begin += EACH * WARP) {
    const int64_t first = begin + EACH * t;
    int64_t numbers[EACH], here = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) numbers[k] = first + k < parts ? mine[first + k] : 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) here += numbers[k];
    int64_t up_to_me = here;
    for (int step = 1; step < WARP; step *= 2) {
      const int64_t other = __shfl_up_sync(ALL, (long long)up_to_me, step);
      if (t >= step) up_to_me += other;
    }
    int64_t before_me = sum + up_to_me - here;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      if (first + k < parts) mine[first + k] = before_me;
      before_me += numbers[k];
    }
    sum += __shfl_sync(ALL, (long long)up_to_me, WARP - 1);
  }
  if (t == 0) {
    c.demand[e] = sum;
    c.counts[e] = count_of(sum, c.capacity);
  }
}

// first_e = assignments to the experts before e; one warp.
__global__ void first_kernel(const int64_t* __restrict__ demand, int64_t experts, int64_t* __restrict__ first) {
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
template <class Word>
__device__ __forceinline__ void copy_row(Word* to, const Word* from, int64_t n) {
  constexpr int AHEAD = 4;
  for (int64_t i = threadIdx.x; i < n; i += AHEAD * int64_t(blockDim.x)) {
    Word words[AHEAD] = {};
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (from != nullptr && i + k * int64_t(blockDim.x) < n) words[k] = from[i + k * int64_t(blockDim.x)];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (i + k * int64_t(blockDim.x) < n) to[i + k * int64_t(blockDim.x)] = words[k];
  }
}

__global__ void __launch_bounds__(THREADS) permute_kernel(Permute c) {
  const int64_t row = blockIdx.x, at = c.source[row];
  char* to = static_cast<char*>(c.y) + row * c.row_bytes;
  const char* from = at < 0 ? nullptr : static_cast<const char*>(c.x) + at / c.choices * c.row_bytes;
  if (((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uintptr_t(c.row_bytes)) & 15) == 0)
    copy_row(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from), c.row_bytes / 16);
  else copy_row(reinterpret_cast<uint16_t*>(to), reinterpret_cast<const uint16_t*>(from), c.row_bytes / 2);
}

// The rows and weights of AHEAD choices at a time, and then their numbers, are on their way together.
__global__ void __launch_bounds__(THREADS) unpermute_kernel(Unpermute c, bool wide) {
  constexpr int AHEAD = 2;
  const int64_t token = blockIdx.x, n = c.dim;
  each_pack(n, wide, [&](auto width, int64_t i) {
    constexpr int WIDTH = decltype(width)::value;
    Pack<WIDTH> sum = {};
    for (int64_t first = 0; first < c.choices; first += AHEAD) {
      int64_t rows[AHEAD];
      float w[AHEAD];
      Bits<WIDTH> y[AHEAD] = {};
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        const int64_t at = token * c.choices + first + k;
        const bool there = first + k < c.choices;
        rows[k] = there ? c.rows[at] : -1;
        w[k] = there && c.weights != nullptr ? load(c.weights, c.weight_dtype, at) : 1.0f;
      }
#pragma unroll
      for (int k = 0; k < AHEAD; ++k)
        if (rows[k] >= 0 && rows[k] < c.num_rows) y[k] = fetch<WIDTH>(c.y, c.dtype, rows[k] * n + i);
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {
        if (rows[k] == -1) continue;
        const Pack<WIDTH> value = widened(y[k], c.dtype);
        const bool outside = rows[k] < 0 || rows[k] >= c.num_rows;
#pragma unroll
        for (int m = 0; m < WIDTH; ++m) {
          if (outside) sum.x[m] = float_of_bits(NAN_BITS);
          else sum.x[m] += c.weights == nullptr ? value.x[m] : w[k] * value.x[m];
        }
      }
    }
    store_pack(sum, c.out, c.dtype, token * n + i);
  });
}

// A block a row: dy is written and the products are summed as the row goes by, in pieces.
__global__ void __launch_bounds__(THREADS) unpermute_backward_kernel(UnpermuteBackward c, bool wide) {
  extern __shared__ float4 memory[];
  float* const products = reinterpret_cast<float*>(memory);
  const int64_t row = blockIdx.x, n = c.dim, at = c.source[row], token = at < 0 ? 0 : at / c.choices;
  if (at < 0) {
    each_pack(n, wide, [&](auto width, int64_t i) {
      store_pack(Pack<decltype(width)::value>{}, c.grad_y, c.dtype, row * n + i);
    });
    return;
  }
  const float w = load(c.weights, c.weight_dtype, at);
  LaneSums<1> lanes;
  each_piece(n, piece_of(n, 1), [&](int64_t begin, int64_t count, bool only) {
    each_pack(count, wide, [&](auto width, int64_t i) {
      constexpr int WIDTH = decltype(width)::value;
      const Bits<WIDTH> of_g = fetch<WIDTH>(c.grad_out, c.dtype, token * n + begin + i);
      const Bits<WIDTH> of_y = fetch<WIDTH>(c.y, c.dtype, row * n + begin + i);
      const Pack<WIDTH> g = widened(of_g, c.dtype), y = widened(of_y, c.dtype);
      Pack<WIDTH> dy, product;
#pragma unroll
      for (int m = 0; m < WIDTH; ++m) {
        dy.x[m] = w * g.x[m];
        product.x[m] = g.x[m] * y.x[m];
      }
      store_pack(dy, c.grad_y, c.dtype, row * n + begin + i);
      to_tile(product, products, i);
    });
    lanes.add(count, [&](int, int64_t i) { return products[i]; });
    if (!only) __syncthreads();
  });
  float dw[1];
  lanes.fold(dw);
  if (threadIdx.x == 0) store(c.grad_weights, c.weight_dtype, at, dw[0]);
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
    places_kernel<false><<<unsigned(parts), THREADS, 0, s>>>(c, taken, parts);
  }
  scan_kernel<<<blocks_for(c.experts, WARPS), WARP * WARPS, 0, s>>>(c, taken, parts);
  if (parts > 0) places_kernel<true><<<unsigned(parts), THREADS, 0, s>>>(c, taken, parts);
  if (parts > 0 && c.key != nullptr && c.capacity >= 0) {
    if (c.experts > MAX_ROWS) return cudaErrorInvalidValue;
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
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  permute_kernel<<<unsigned(c.rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(c);
  return cudaGetLastError();
}

int32_t unpermute(const Unpermute& c, void* stream) {
  if (c.tokens == 0 || c.dim == 0) return cudaSuccess;
  if (c.tokens > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.dim, {c.y, c.out});
  unpermute_kernel<<<unsigned(c.tokens), row_threads(c.dim), 0, static_cast<cudaStream_t>(stream)>>>(c, wide);
  return cudaGetLastError();
}

int32_t unpermute_backward(const UnpermuteBackward& c, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const size_t bytes = size_t(c.tokens * c.choices) * (c.weight_dtype == F32 ? 4 : 2);
  const cudaError_t error = bytes == 0 ? cudaSuccess : cudaMemsetAsync(c.grad_weights, 0, bytes, s);
  if (error != cudaSuccess || c.rows == 0) return error;
  if (c.rows > MAX_ROWS) return cudaErrorInvalidValue;
  const bool wide = in_packs(c.dim, {c.grad_out, c.y, c.grad_y});
  unpermute_backward_kernel<<<unsigned(c.rows), row_threads(c.dim), row_bytes(c.dim, 1), s>>>(c, wide);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
