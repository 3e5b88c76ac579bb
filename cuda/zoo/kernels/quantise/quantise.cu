// Quantisation on GPUs: the maths and the memory contract of quantise.h, bit for bit. Compile with -fmad=false.
//
// A group goes to 2 to 32 threads of a warp, or, beyond 2,048 elements, to a block; a thread has eight elements at a
// time, of which the first stay in registers until the scale is known: all of them in groups of up to 256. Others are
// found in the cache.
#include "../common/blocks.cuh"
#include "../common/device.cuh"
#include "../common/divider.h"
#include "quantise.h"

namespace zoo {
namespace {

// Swizzle::place without dividing.
class Place {
 public:
  explicit Place(const Swizzle& s)
      : piece_(uint64_t(s.piece)), local_(uint64_t(s.local)), nodes_(s.nodes), locals_(s.local), length_(s.piece) {}

  ZOO_HD int64_t operator()(uint32_t i) const {
    const uint32_t which = piece_.quotient(i), n = local_.quotient(which);
    return ((which - n * locals_) * nodes_ + n) * length_ + piece_.rest(i);
  }

 private:
  Divider piece_, local_;
  int64_t nodes_, locals_, length_;
};

// What the codes of a group are made from: max |x|, or the minimum and the maximum. As integers that are ordered as the
// numbers are, all to be as large as possible, with a NaN beyond an infinity: so a NaN wins. 0 is of no element.
template <bool SYMMETRIC>
struct Ends {
  static constexpr int COUNT = SYMMETRIC ? 1 : 2;
  uint32_t most[COUNT] = {};

  __device__ __forceinline__ void add(const Pack<WIDE>& v, int count) {
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
      const uint32_t bits = bits_of_float(v.x[k]);
      if (SYMMETRIC) {  // beyond the last element are zeros
        most[0] = max(most[0], bits & 0x7FFFFFFFu);
      } else if (k < count) {
        const uint32_t ordered = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
        most[0] = max(most[0], ordered);
        most[COUNT - 1] = max(most[COUNT - 1], ~ordered);
      }
    }
  }

  // Those of all `width` threads (2 to 32, or a whole block).
  __device__ __forceinline__ void join(int width) {
    for (int half = (width < WARP ? width : WARP) / 2; half > 0; half /= 2)
#pragma unroll
      for (int e = 0; e < COUNT; ++e) most[e] = max(most[e], __shfl_xor_sync(ALL, most[e], half));
    if (width <= WARP) return;
    __shared__ uint32_t of_warp[THREADS / WARP][COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; ++e)
      if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP][e] = most[e];
    __syncthreads();
    for (int k = 0; k < THREADS / WARP; ++k)
#pragma unroll
      for (int e = 0; e < COUNT; ++e) most[e] = max(most[e], of_warp[k][e]);
  }

  static __device__ __forceinline__ float number(uint32_t ordered) {
    return float_of_bits(ordered ^ (uint32_t(int32_t(~ordered) >> 31) | 0x80000000u));
  }

  __device__ __forceinline__ float zero() const { return SYMMETRIC ? 0.0f : number(~most[COUNT - 1]); }

  __device__ __forceinline__ float span() const {
    return SYMMETRIC ? float_of_bits(most[0]) : number(most[0]) - zero();
  }
};

// Of x - zero.
__device__ __forceinline__ int32_t whole(float x, float inverse, float limit) {
  float t = inverse * x;
  t = t != t ? 0.0f : t;
  t = t > limit ? limit : t;
  t = t < -limit ? -limit : t;
  return int32_t((t + 12582912.0f) - 12582912.0f);  // rounds to nearest, ties to even, as on the CPU
}

// The `count` <= 8 elements from `at` on that there are, zeros behind them.
__device__ __forceinline__ Pack<WIDE> take(const void* x, Dtype dtype, int64_t at, int count, bool aligned) {
  if (aligned && count == WIDE) return load_pack<WIDE>(x, dtype, at);
  Pack<WIDE> pack = {};
  for (int k = 0; k < WIDE; ++k)
    if (k < count) pack.x[k] = load(x, dtype, at + k);
  return pack;
}

// Their whole numbers, to the group's bytes from element `at` of it on; eight elements begin at a multiple of 8 bytes,
// or 4.
__device__ __forceinline__ void put(const int32_t (&w)[WIDE], int8_t* q, int64_t at, int bits, int count) {
  uint32_t words[2] = {};
#pragma unroll
  for (int k = 0; k < WIDE; ++k) {
    if (bits == 8) words[k / 4] |= (uint32_t(w[k]) & 255u) << (k % 4 * 8);
    else words[0] |= (uint32_t(w[k]) & 15u) << (k * 4);
  }
  int8_t* const to = q + at * bits / 8;
  if (count == WIDE) {
    if (bits == 8) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    else *reinterpret_cast<uint32_t*>(to) = words[0];
    return;
  }
#pragma unroll
  for (int byte = 0; byte < WIDE; ++byte)
    if (byte * 8 / bits < count) to[byte] = int8_t(words[byte / 4] >> (byte % 4 * 8));
}

// Six blocks a multiprocessor: at most 40 registers.
template <bool SYMMETRIC>
__global__ void __launch_bounds__(THREADS, 6)
    quantise_kernel(const void* x, Dtype dtype, int bits, int8_t* q, float* scales, float* minima, int64_t n, int group,
                    Place place, int width, bool aligned) {
  const int64_t groups = ceil_div(n, group);
  const int64_t index = int64_t(blockIdx.x) * (THREADS / width) + threadIdx.x / width;
  const int t = threadIdx.x % width;
  // Threads beyond the last group stay for the shuffles.
  const int64_t begin = index < groups ? index * group : n;
  const int size = n - begin < group ? int(n - begin) : group;
  const auto from = [&](int at) { return take(x, dtype, begin + at, size - at < WIDE ? size - at : WIDE, aligned); };
  const Pack<WIDE> kept = from(WIDE * t);  // of a thread without elements: zeros
  Ends<SYMMETRIC> ends;
  ends.add(kept, size - WIDE * t);
  for (int at = WIDE * (t + width); at < size; at += WIDE * width) ends.add(from(at), size - at);
  ends.join(width);
  if (index >= groups) return;
  const float zero = ends.zero(), span = ends.span();
  const float limit = code_limit(bits, SYMMETRIC), inverse = __fdiv_rn(limit, span);
  const int64_t to = place(uint32_t(index));
  if (t == 0) {
    scales[to] = __fdiv_rn(span, limit);
    if (!SYMMETRIC) minima[to] = zero;
  }
  int8_t* const mine = q + to * group * bits / 8;
  for (int at = WIDE * t; at < size; at += WIDE * width) {
    const Pack<WIDE> v = at == WIDE * t ? kept : from(at);
    int32_t w[WIDE];
#pragma unroll
    for (int k = 0; k < WIDE; ++k)  // 0 beyond the last element
      w[k] = SYMMETRIC ? whole(v.x[k], inverse, limit) : k < size - at ? whole(v.x[k] - zero, inverse, limit) : 0;
    put(w, mine, at, bits, size - at < WIDE ? size - at : WIDE);
  }
}

// Elements at, ..., at + count - 1 of one rank as whole numbers; at is a multiple of 8, the bytes begin anywhere.
template <bool SYMMETRIC>
__device__ __forceinline__ void take_whole(const int8_t* q, int64_t at, int bits, int count, int32_t (&w)[WIDE]) {
  const int8_t* const from = q + at * bits / 8;
  uint32_t words[2] = {};
  const int bytes = (count * bits + 7) / 8;
  if (bits == 8 && count == WIDE && (reinterpret_cast<uintptr_t>(from) & 7) == 0) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    words[0] = two.x, words[1] = two.y;
  } else if (bits == 4 && count == WIDE && (reinterpret_cast<uintptr_t>(from) & 3) == 0) {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  } else {
    for (int byte = 0; byte < WIDE; ++byte)
      if (byte < bytes) words[byte / 4] |= uint32_t(uint8_t(from[byte])) << (byte % 4 * 8);
  }
#pragma unroll
  for (int k = 0; k < WIDE; ++k) {  // moved up and down again: with their sign, if they have one
    const uint32_t up = bits == 8 ? words[k / 4] << (24 - k % 4 * 8) : words[0] << (28 - k * 4);
    w[k] = SYMMETRIC ? int32_t(up) >> (32 - bits) : int32_t(up >> (32 - bits));
  }
}

// A thread eight elements, which are of one group.
template <bool SYMMETRIC>
__global__ void __launch_bounds__(THREADS)
    dequantise_kernel(void* out, Dtype dtype, int bits, const int8_t* q, const float* scales, const float* minima,
                      int64_t ranks, float factor, int64_t n, int64_t groups, Divider packs_of_group, bool aligned) {
  const int64_t pack = int64_t(blockIdx.x) * THREADS + threadIdx.x, at = WIDE * pack;
  if (at >= n) return;
  const int64_t stride = ceil_div(n * bits, 8), mine = packs_of_group.quotient(uint32_t(pack));
  const int count = n - at < WIDE ? int(n - at) : WIDE;
  Pack<WIDE> sum = {};
  for (int64_t r = 0; r < ranks; ++r) {
    const float scale = scales[r * groups + mine], zero = SYMMETRIC ? 0.0f : minima[r * groups + mine];
    int32_t w[WIDE];
    take_whole<SYMMETRIC>(q + r * stride, at, bits, count, w);
#pragma unroll
    for (int k = 0; k < WIDE; ++k) {
      const float y = SYMMETRIC ? scale * float(w[k]) : scale * float(w[k]) + zero;
      sum.x[k] = r == 0 ? y : sum.x[k] + y;
    }
  }
  if (factor != 1.0f)
#pragma unroll
    for (int k = 0; k < WIDE; ++k) sum.x[k] = factor * sum.x[k];
  if (aligned && count == WIDE) {
    store_pack(sum, out, dtype, at);
    return;
  }
  for (int k = 0; k < WIDE; ++k)
    if (k < count) store(out, dtype, at + k, sum.x[k]);
}

int width_for(int64_t group) {
  if (group > 2048) return THREADS;
  int width = 2;
  while (width < WARP && WIDE * width < group) width *= 2;
  return width;
}

bool is_aligned(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 16 == 0; }

constexpr int64_t MOST = 0xFFFFFFFF;  // what a Divider divides

}  // namespace

namespace cuda {

int32_t quantise(const void* x, Dtype dtype, int32_t bits, void* q, float* scales, float* minima, int64_t n,
                 int64_t group, const Swizzle& swizzle, void* stream) {
  const int64_t groups = ceil_div(n, group);
  if (n == 0) return cudaSuccess;
  if (groups > MOST) return cudaErrorInvalidValue;
  const int width = width_for(group);
  const auto kernel = minima == nullptr ? quantise_kernel<true> : quantise_kernel<false>;
  kernel<<<blocks_for(groups, THREADS / width), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
      x, dtype, bits, static_cast<int8_t*>(q), scales, minima, n, int(group), Place(swizzle), width, is_aligned(x));
  return cudaGetLastError();
}

int32_t dequantise(void* out, Dtype dtype, int32_t bits, const void* q, const float* scales, const float* minima,
                   int64_t ranks, float factor, int64_t n, int64_t group, void* stream) {
  const int64_t packs = ceil_div(n, WIDE);
  if (n == 0) return cudaSuccess;
  if (packs > MOST) return cudaErrorInvalidValue;
  const auto kernel = minima == nullptr ? dequantise_kernel<true> : dequantise_kernel<false>;
  kernel<<<blocks_for(packs, THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
      out, dtype, bits, static_cast<const int8_t*>(q), scales, minima, ranks, factor, n, ceil_div(n, group),
      Divider(uint64_t(group / WIDE)), is_aligned(out));
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
