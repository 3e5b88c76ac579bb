// Quantisation on GPUs: the maths and the memory contract of quantise.h, bit for bit. Compile with -fmad=false.
//
// A group goes to 4, 8, 16 or 32 threads of a warp, or, beyond 4,096 elements, to a block; a thread has four elements at
// a time. The second look at a group finds it in the cache.
#include "../common/blocks.cuh"
#include "../common/device.cuh"
#include "quantise.h"

namespace zoo {
namespace {

// The largest of all `width` threads (4 to 32, or a whole block). The bits of |x| as integers are ordered as |x| is, and
// a NaN is above infinity: so a NaN wins.
__device__ __forceinline__ uint32_t largest(uint32_t most, int width) {
  for (int half = (width < WARP ? width : WARP) / 2; half > 0; half /= 2)
    most = max(most, __shfl_xor_sync(ALL, most, half));
  if (width <= WARP) return most;
  __shared__ uint32_t of_warp[THREADS / WARP];
  if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = most;
  __syncthreads();
  for (int k = 0; k < THREADS / WARP; ++k) most = max(most, of_warp[k]);
  return most;
}

__device__ __forceinline__ int32_t whole(float x, float inverse, float limit) {
  float t = inverse * x;
  t = t != t ? 0.0f : t;
  t = t > limit ? limit : t;
  t = t < -limit ? -limit : t;
  return int32_t((t + 12582912.0f) - 12582912.0f);  // rounds to nearest, ties to even, as on the CPU
}

// Four elements (or fewer) from element `at` of the group on, whose bytes begin at a multiple of 4 or of 2.
__device__ __forceinline__ void put(const int32_t (&w)[4], int8_t* q, int64_t at, int bits, int count) {
  if (bits == 8) {
    if (count == 4) *reinterpret_cast<char4*>(q + at) = make_char4(int8_t(w[0]), int8_t(w[1]), int8_t(w[2]), int8_t(w[3]));
    else
      for (int k = 0; k < 4; ++k)
        if (k < count) q[at + k] = int8_t(w[k]);
    return;
  }
  const int8_t low = int8_t((w[0] & 15) | ((w[1] & 15) << 4)), high = int8_t((w[2] & 15) | ((w[3] & 15) << 4));
  q[at / 2] = low;
  if (count > 2) q[at / 2 + 1] = high;
}

__global__ void __launch_bounds__(THREADS) quantise_kernel(const void* x, Dtype dtype, int bits, int8_t* q, float* scales,
                                                           int64_t n, int64_t group, Swizzle swizzle, int width) {
  const int64_t groups = ceil_div(n, group);
  const int64_t index = int64_t(blockIdx.x) * (THREADS / width) + threadIdx.x / width;
  const int t = threadIdx.x % width;
  // Threads beyond the last group stay for the shuffles.
  const int64_t begin = index < groups ? index * group : n, end = begin + group < n ? begin + group : n;
  uint32_t bits_of_most = 0;
  for (int64_t at = begin + 4 * t; at < end; at += 4 * width) {
    const Four v = load4(x, dtype, at, end - at < 4 ? int(end - at) : 4);  // zeros where there is none
    for (int k = 0; k < 4; ++k) bits_of_most = max(bits_of_most, bits_of_float(v.x[k]) & 0x7FFFFFFFu);
  }
  const float most = float_of_bits(largest(bits_of_most, width));
  if (index >= groups) return;
  const float limit = bits == 8 ? 127.0f : 7.0f, inverse = __fdiv_rn(limit, most);
  const int64_t to = swizzle.place(index);
  if (t == 0) scales[to] = __fdiv_rn(most, limit);
  int8_t* const mine = q + to * group * bits / 8;
  for (int64_t at = begin + 4 * t; at < end; at += 4 * width) {
    const int count = end - at < 4 ? int(end - at) : 4;
    const Four v = load4(x, dtype, at, count);
    int32_t w[4];
    for (int k = 0; k < 4; ++k) w[k] = k < count ? whole(v.x[k], inverse, limit) : 0;
    put(w, mine, at - begin, bits, count);
  }
}

// Elements at, …, at + 3 of one rank as whole numbers; at is a multiple of 4, the bytes begin anywhere.
__device__ __forceinline__ void take(const int8_t* q, int64_t at, int bits, int count, int32_t (&w)[4]) {
  if (bits == 8) {
    const int8_t* p = q + at;
    if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 3) == 0) {
      const char4 c = *reinterpret_cast<const char4*>(p);
      w[0] = c.x, w[1] = c.y, w[2] = c.z, w[3] = c.w;
      return;
    }
    for (int k = 0; k < 4; ++k) w[k] = k < count ? p[k] : 0;
    return;
  }
  const int32_t low = q[at / 2], high = count > 2 ? q[at / 2 + 1] : 0;
  w[0] = int32_t(uint32_t(low) << 28) >> 28;  // the lower four bits, with their sign
  w[1] = low >> 4;
  w[2] = int32_t(uint32_t(high) << 28) >> 28;
  w[3] = high >> 4;
}

__global__ void __launch_bounds__(THREADS) dequantise_kernel(void* out, Dtype dtype, int bits, const int8_t* q,
                                                             const float* scales, int64_t ranks, float factor, int64_t n,
                                                             int64_t group) {
  const int64_t at = 4 * (int64_t(blockIdx.x) * THREADS + threadIdx.x);
  if (at >= n) return;
  const int64_t groups = ceil_div(n, group), stride = ceil_div(n * bits, 8), mine = at / group;
  const int count = n - at < 4 ? int(n - at) : 4;
  Four sum = {};
  for (int64_t r = 0; r < ranks; ++r) {
    const float scale = scales[r * groups + mine];
    int32_t w[4];
    take(q + r * stride, at, bits, count, w);
    for (int k = 0; k < 4; ++k) {
      const float y = scale * float(w[k]);
      sum.x[k] = r == 0 ? y : sum.x[k] + y;
    }
  }
  if (factor != 1.0f)
    for (int k = 0; k < 4; ++k) sum.x[k] = factor * sum.x[k];
  store4(sum, out, dtype, at, count);
}

int width_for(int64_t group) {
  if (group > 4096) return THREADS;
  int width = 4;
  while (width < WARP && 4 * width < group) width *= 2;
  return width;
}

}  // namespace

namespace cuda {

int32_t quantise(const void* x, Dtype dtype, int32_t bits, int8_t* q, float* scales, int64_t n, int64_t group,
                 const Swizzle& swizzle, void* stream) {
  if (n == 0) return cudaSuccess;
  const int width = width_for(group);
  const unsigned blocks = blocks_for(ceil_div(n, group), THREADS / width);
  quantise_kernel<<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(x, dtype, bits, q, scales, n, group, swizzle,
                                                                             width);
  return cudaGetLastError();
}

int32_t dequantise(void* out, Dtype dtype, int32_t bits, const int8_t* q, const float* scales, int64_t ranks,
                   float factor, int64_t n, int64_t group, void* stream) {
  if (n == 0) return cudaSuccess;
  dequantise_kernel<<<blocks_for(n, 4 * THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
      out, dtype, bits, q, scales, ranks, factor, n, group);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
