// Number formats that the CPU and the CUDA versions share: bfloat16 and half as their 16 bits, arithmetic in fp32.
//
//   bf16: 1 sign, 8 exponent, 7 fraction bits: the upper half of an fp32.
//   fp16: 1 sign, 5 exponent, 10 fraction bits (IEEE 754 binary16).
//
// Widening is exact. Narrowing rounds to nearest, ties to even; too large a number becomes infinite, subnormals are
// kept (so the bf16 instructions of AVX-512, which flush them to zero, are of no use here), and a NaN stays a NaN.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ZOO_HD __host__ __device__ __forceinline__
#else
#define ZOO_HD inline __attribute__((always_inline))
#endif

// The instruction set is part of every CPU symbol's name: the linker must not merge an inline function that was
// compiled with AVX-512 into the plain path.
#if !defined(ZOO_ISA)
#define ZOO_ISA portable
#endif

namespace zoo {

enum Dtype : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

inline namespace ZOO_ISA {

// ⌈a/b⌉ of a >= 0 and b > 0.
ZOO_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

ZOO_HD float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

ZOO_HD uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

ZOO_HD float bf16_to_float(uint16_t bits) { return float_of_bits(uint32_t(bits) << 16); }

ZOO_HD uint16_t float_to_bf16(float value) {
  const uint32_t u = bits_of_float(value);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return uint16_t((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

ZOO_HD float f16_to_float(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu;
  // The fraction in place, the exponent 112 too small: multiplying by 2^112 is right for both normal and subnormal
  // numbers.
  const uint32_t finite = bits_of_float(float_of_bits(magnitude << 13) * float_of_bits(0x77800000u));
  const uint32_t special = 0x7F800000u | (magnitude << 13);
  return float_of_bits((magnitude >= 0x7C00u ? special : finite) | (uint32_t(bits & 0x8000u) << 16));
}

ZOO_HD uint16_t float_to_f16(float value) {
  const uint32_t u = bits_of_float(value), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  // Normal: rebias the exponent, round at bit 13. A carry out of the fraction raises the exponent, up to infinity.
  const uint32_t normal = (a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  // Subnormal (below 2^-14): adding 0.5 aligns the fraction so that the addition itself rounds at bit 2^-24.
  const uint32_t subnormal = bits_of_float(float_of_bits(a) + 0.5f) - 0x3F000000u;
  const uint32_t finite = a < 0x38800000u ? subnormal : normal;
  const uint32_t large = a > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return uint16_t((a >= 0x47800000u ? large : finite) | sign);
}

// 1/√(x + ε), each operation rounded by itself.
ZOO_HD float rstd_of(float x, float eps) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(1.0f, __fsqrt_rn(x + eps));
#else
  return 1.0f / __builtin_sqrtf(x + eps);
#endif
}

}  // namespace ZOO_ISA
}  // namespace zoo
