// Four consecutive numbers of any of the three formats as fp32, from and to device memory.
#pragma once

#include "numbers.h"

namespace zoo {

struct Four {
  float x[4];
};

// `full`: all four elements exist. Aligned fours move as one access, others one by one.
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

}  // namespace zoo
