// Blocks of fp32 from and to memory of any of the three formats (CPU).
//
// A kernel asks for up to BLOCK elements as fp32. fp32 memory is handed out in place, without a copy; bf16 and fp16 go
// through a buffer that stays in the L1 cache, so that one loop over floats serves every combination of formats and a
// conversion never costs a pass over memory.
#pragma once

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace zoo {
inline namespace ZOO_ISA {

constexpr int64_t BLOCK = 256;  // of 128 to 2048 this measured best: five blocks of fp32 fill a sixth of an L1 cache

static inline int64_t size_of(Dtype dtype) { return dtype == F32 ? 4 : 2; }

// 16 bits a number at a time. The intrinsics are there because compilers turn the plain loops, which they follow, into
// shuffles that take several times as long.
static inline void widen_bf16(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 16 <= n; i += 16) {
    const __m256i bits = _mm256_loadu_si256((const __m256i*)(from + i));
    _mm512_storeu_si512(to + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128((const __m128i*)(from + i));
    _mm256_storeu_si256((__m256i*)(to + i), _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
#endif
  for (; i < n; ++i) to[i] = bf16_to_float(from[i]);
}

static inline void narrow_bf16(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512i half = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1), nan = _mm512_set1_epi32(0x7FC0);
  for (; i + 16 <= n; i += 16) {
    const __m512 x = _mm512_loadu_ps(from + i);
    const __m512i u = _mm512_castps_si512(x), upper = _mm512_srli_epi32(u, 16);
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, half), _mm512_and_epi32(upper, one));
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan);
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtepi32_epi16(bits));
  }
#elif defined(__AVX2__)
  const __m256i half = _mm256_set1_epi32(0x7FFF), one = _mm256_set1_epi32(1), nan = _mm256_set1_epi32(0x7FC0);
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(from + i);
    const __m256i u = _mm256_castps_si256(x), upper = _mm256_srli_epi32(u, 16);
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(u, half), _mm256_and_si256(upper, one));
    const __m256i isnan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i bits = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), nan, isnan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xD8);
    _mm_storeu_si128((__m128i*)(to + i), _mm256_castsi256_si128(packed));
  }
#endif
  for (; i < n; ++i) to[i] = float_to_bf16(from[i]);
}

static inline void widen_f16(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < n; ++i) to[i] = f16_to_float(from[i]);
}

static inline void narrow_f16(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; ++i) to[i] = float_to_f16(from[i]);
}

[[maybe_unused]] static __attribute__((noinline)) void narrow(const float* from, void* to, Dtype dtype, int64_t offset,
                                                              int64_t n) {
  if (dtype == F32) {
    if (static_cast<float*>(to) + offset != from) memcpy(static_cast<float*>(to) + offset, from, size_t(n) * 4);
  } else if (dtype == BF16) {
    narrow_bf16(from, static_cast<uint16_t*>(to) + offset, n);
  } else {
    narrow_f16(from, static_cast<uint16_t*>(to) + offset, n);
  }
}

[[maybe_unused]] static __attribute__((noinline)) void widen(const uint16_t* from, float* to, Dtype dtype, int64_t n) {
  if (dtype == BF16) widen_bf16(from, to, n);
  else widen_f16(from, to, n);
}

// Elements [offset, offset + n) of `memory` as fp32: in place for fp32, else widened into `buffer`. n <= BLOCK.
static inline float* fp32_block(void* memory, Dtype dtype, int64_t offset, int64_t n, float* buffer) {
  if (memory == nullptr) return nullptr;
  if (dtype == F32) return static_cast<float*>(memory) + offset;
  const uint16_t* from = static_cast<const uint16_t*>(memory) + offset;
  widen(from, buffer, dtype, n);
  return buffer;
}

static inline const float* fp32_block(const void* memory, Dtype dtype, int64_t offset, int64_t n, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, offset, n, buffer);
}

// Where results for `memory` go before write_block narrows them: in place for fp32, else `buffer`.
static inline float* result_block(void* memory, Dtype dtype, int64_t offset, float* buffer) {
  return dtype == F32 ? static_cast<float*>(memory) + offset : buffer;
}

// The counterpart of fp32_block for memory that was changed: narrows what went through a buffer.
static inline void write_block(const float* block, void* memory, Dtype dtype, int64_t offset, int64_t n) {
  if (memory != nullptr && dtype != F32) narrow(block, memory, dtype, offset, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
