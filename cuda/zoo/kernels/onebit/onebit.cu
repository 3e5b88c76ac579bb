// 1-bit compression on GPUs: the maths and the memory contract of onebit.h, bit for bit. Compile with -fmad=false.
//
// One warp a group: lane k of the first 16 adds up the elements k, k + 16, k + 32 … of the group in order, as the CPU's
// lanes do; the signs of 32 elements at a time are a ballot.
#include "../common/blocks.cuh"
#include "../common/device.cuh"
#include "../common/lanes.h"
#include "onebit.h"

namespace zoo {
namespace {

// What is given, as element `at` of group `index`.
struct Numbers {
  const void* x;
  Dtype dtype;
  __device__ __forceinline__ float operator()(int64_t at, int64_t) const { return load(x, dtype, at); }
};

// The mean of what ranks sent.
struct MeanOfWires {
  const uint8_t* wires;
  int64_t stride, ranks, head;
  float factor;
  __device__ __forceinline__ float operator()(int64_t at, int64_t index) const {
    float sum = 0.0f;
    for (int64_t r = 0; r < ranks; ++r) {
      const uint8_t* const wire = wires + r * stride;
      const float scale = reinterpret_cast<const float*>(wire)[index];
      const float y = (wire[head + at / 8] >> (at % 8)) & 1 ? scale : -scale;
      sum = r > 0 ? sum + y : y;
    }
    return sum * factor;
  }
};

template <class X>
__global__ void __launch_bounds__(32 * WARPS)
    compress_kernel(float* c, X x, const float* error, const uint8_t* sent_bits, const float* sent_scales,
                    uint8_t* bits, float* scales, int64_t n, int64_t group) {
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32, begin = index * group;
  if (begin >= n) return;
  const int64_t end = begin + group < n ? begin + group : n;
  const float sent = sent_scales != nullptr ? sent_scales[index] : 0.0f;
  float sum = 0;
  for (int64_t at = begin; at < end; at += 32) {
    const bool inside = at + lane < end;
    float value = inside ? x(at + lane, index) : 0.0f;
    if (inside && error != nullptr) {
      float e = error[at + lane];
      if (sent_bits != nullptr) e = e - ((sent_bits[(at + lane) / 8] >> (lane % 8)) & 1 ? sent : -sent);
      value = value + e;
    }
    if (inside && c != nullptr) c[at + lane] = value;
    const uint32_t word = __ballot_sync(0xFFFFFFFFu, inside && value >= 0.0f);
    if (lane < 4 && at + 8 * lane < end) bits[at / 8 + lane] = uint8_t(word >> (8 * lane));
    // Lane k < 16 takes element k, then element k + 16, which lane k + 16 has: the order of the reference.
    const float magnitude = fabsf(value), upper = __shfl_down_sync(0xFFFFFFFFu, magnitude, 16);
    sum = (sum + magnitude) + upper;
  }
  float total = sum;  // that of the first lane counts
  for (int k = 1; k < SHORT_LANES; ++k) total = total + __shfl_sync(0xFFFFFFFFu, sum, k);
  if (lane == 0) scales[index] = total / float(end - begin);
}

// A thread a byte of bits: eight elements, all of one group.
__global__ void __launch_bounds__(THREADS)
    owed_kernel(float* error, const float* c, const uint8_t* bits, const float* scales, int64_t n, int64_t group) {
  const int64_t byte = int64_t(blockIdx.x) * THREADS + threadIdx.x, begin = 8 * byte;
  if (begin >= n) return;
  const float scale = scales[begin / group];
  const uint32_t signs = bits[byte];
  for (int k = 0; k < 8 && begin + k < n; ++k) error[begin + k] = c[begin + k] - ((signs >> k) & 1 ? scale : -scale);
}

// A thread a byte of bits: eight elements, all of one group.
__global__ void __launch_bounds__(THREADS) decompress_kernel(void* out, Dtype dtype, const uint8_t* bits,
                                                             const float* scales, bool add, int64_t n, int64_t group) {
  const int64_t byte = int64_t(blockIdx.x) * THREADS + threadIdx.x, begin = 8 * byte;
  if (begin >= n) return;
  const float scale = scales[begin / group];
  const uint32_t signs = bits[byte];
  for (int part = 0; part < 2; ++part) {
    const int64_t at = begin + 4 * part;
    if (at >= n) return;
    const int count = n - at < 4 ? int(n - at) : 4;
    Four y = {};
    if (add) y = load4(out, dtype, at, count);
    for (int k = 0; k < 4; ++k) {
      const float s = (signs >> (4 * part + k)) & 1 ? scale : -scale;
      y.x[k] = add ? y.x[k] + s : s;
    }
    store4(y, out, dtype, at, count);
  }
}

}  // namespace

namespace cuda {

int32_t onebit_compress(float* c, const void* x, Dtype dtype, const float* error, const uint8_t* sent_bits,
                        const float* sent_scales, uint8_t* bits, float* scales, int64_t n, int64_t group,
                        void* stream) {
  if (n > 0)
    compress_kernel<<<blocks_for(ceil_div(n, group), WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(
        c, Numbers{x, dtype}, error, sent_bits, sent_scales, bits, scales, n, group);
  return cudaGetLastError();
}

int32_t onebit_compress_mean(float* c, const uint8_t* wires, int64_t stride, int64_t ranks, float factor,
                             const float* error, const uint8_t* sent_bits, const float* sent_scales, uint8_t* bits,
                             float* scales, int64_t n, int64_t group, void* stream) {
  const MeanOfWires mean = {wires, stride, ranks, 4 * ceil_div(n, group), factor};
  if (n > 0)
    compress_kernel<<<blocks_for(ceil_div(n, group), WARPS), WARP * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(
        c, mean, error, sent_bits, sent_scales, bits, scales, n, group);
  return cudaGetLastError();
}

int32_t onebit_owed(float* error, const float* c, const uint8_t* bits, const float* scales, int64_t n, int64_t group,
                    void* stream) {
  if (n > 0)
    owed_kernel<<<blocks_for(n, 8 * THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(error, c, bits, scales,
                                                                                               n, group);
  return cudaGetLastError();
}

int32_t onebit_decompress(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                          int64_t group, void* stream) {
  if (n > 0)
    decompress_kernel<<<blocks_for(n, 8 * THREADS), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(
        out, dtype, bits, scales, add, n, group);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
