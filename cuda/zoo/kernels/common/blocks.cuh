// Consecutive numbers of any of the three formats as fp32, from and to device memory.
#pragma once

#include "numbers.h"

namespace zoo {

struct Four {
  float x[4];
};

// The `count` <= 4 of them that there are. Aligned fours move as one access, others one by one.
__device__ __forceinline__ Four load4(const void* memory, Dtype dtype, int64_t at, int count) {
  Four v = {};
  if (dtype == F32) {
    const float* p = static_cast<const float*>(memory) + at;
    if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
      const float4 q = *reinterpret_cast<const float4*>(p);
      return {{q.x, q.y, q.z, q.w}};
    }
    for (int k = 0; k < 4; ++k)
      if (k < count) v.x[k] = p[k];
    return v;
  }
  const uint16_t* p = static_cast<const uint16_t*>(memory) + at;
  uint16_t bits[4] = {};
  if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    const ushort4 q = *reinterpret_cast<const ushort4*>(p);
    bits[0] = q.x, bits[1] = q.y, bits[2] = q.z, bits[3] = q.w;
  } else {
    for (int k = 0; k < 4; ++k)
      if (k < count) bits[k] = p[k];
  }
  for (int k = 0; k < 4; ++k) v.x[k] = dtype == BF16 ? bf16_to_float(bits[k]) : f16_to_float(bits[k]);
  return v;
}

__device__ __forceinline__ void store4(const Four& v, void* memory, Dtype dtype, int64_t at, int count) {
  if (dtype == F32) {
    float* p = static_cast<float*>(memory) + at;
    if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 15) == 0) {
      *reinterpret_cast<float4*>(p) = make_float4(v.x[0], v.x[1], v.x[2], v.x[3]);
      return;
    }
    for (int k = 0; k < 4; ++k)
      if (k < count) p[k] = v.x[k];
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(memory) + at;
  uint16_t bits[4];
  for (int k = 0; k < 4; ++k) bits[k] = dtype == BF16 ? float_to_bf16(v.x[k]) : float_to_f16(v.x[k]);
  if (count == 4 && (reinterpret_cast<uintptr_t>(p) & 7) == 0) {
    *reinterpret_cast<ushort4*>(p) = make_ushort4(bits[0], bits[1], bits[2], bits[3]);
    return;
  }
  for (int k = 0; k < 4; ++k)
    if (k < count) p[k] = bits[k];
}

// Eight consecutive numbers, or one, in the two halves of an access: first their bits, so that several accesses are on
// their way before one is waited for, then the numbers. Eight begin at a multiple of 16 bytes.
constexpr int WIDE = 8;

template <int WIDTH>
struct Bits {
  uint32_t word[WIDTH];  // a number of fp32 each, two of 16 bits each, or one
};

template <int WIDTH>
struct Pack {
  float x[WIDTH];
};

template <int WIDTH>
__device__ __forceinline__ Bits<WIDTH> fetch(const void* memory, Dtype dtype, int64_t at) {
  Bits<WIDTH> bits = {};
  if constexpr (WIDTH == 1) {
    bits.word[0] = dtype == F32 ? static_cast<const uint32_t*>(memory)[at] : static_cast<const uint16_t*>(memory)[at];
  } else {
    static_assert(WIDTH == WIDE, "eight or one");
    const uint4* const from =
        reinterpret_cast<const uint4*>(static_cast<const char*>(memory) + (dtype == F32 ? 4 : 2) * at);
    uint4 q = from[0];
    bits.word[0] = q.x, bits.word[1] = q.y, bits.word[2] = q.z, bits.word[3] = q.w;
    if (dtype == F32) {
      q = from[1];
      bits.word[4] = q.x, bits.word[5] = q.y, bits.word[6] = q.z, bits.word[7] = q.w;
    }
  }
  return bits;
}

template <int WIDTH>
__device__ __forceinline__ Pack<WIDTH> widened(const Bits<WIDTH>& bits, Dtype dtype) {
  Pack<WIDTH> pack;
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) {
    const uint16_t half = uint16_t(bits.word[k / 2] >> (k % 2 * 16));
    pack.x[k] = dtype == F32 ? float_of_bits(bits.word[k]) : dtype == BF16 ? bf16_to_float(half) : f16_to_float(half);
  }
  return pack;
}

template <int WIDTH>
__device__ __forceinline__ Pack<WIDTH> load_pack(const void* memory, Dtype dtype, int64_t at) {
  return widened(fetch<WIDTH>(memory, dtype, at), dtype);
}

template <int WIDTH>
__device__ __forceinline__ void store_pack(const Pack<WIDTH>& pack, void* memory, Dtype dtype, int64_t at) {
  if constexpr (WIDTH == 1) {
    if (dtype == F32) static_cast<float*>(memory)[at] = pack.x[0];
    else static_cast<uint16_t*>(memory)[at] = dtype == BF16 ? float_to_bf16(pack.x[0]) : float_to_f16(pack.x[0]);
  } else if (dtype == F32) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(memory) + at);
    to[0] = make_float4(pack.x[0], pack.x[1], pack.x[2], pack.x[3]);
    to[1] = make_float4(pack.x[4], pack.x[5], pack.x[6], pack.x[7]);
  } else {
    uint32_t word[WIDE / 2];
#pragma unroll
    for (int k = 0; k < WIDE / 2; ++k) {
      const float low = pack.x[2 * k], high = pack.x[2 * k + 1];
      word[k] = dtype == BF16 ? float_to_bf16(low) | uint32_t(float_to_bf16(high)) << 16
                              : float_to_f16(low) | uint32_t(float_to_f16(high)) << 16;
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(memory) + at) = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace zoo
