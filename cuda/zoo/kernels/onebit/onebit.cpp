// 1-bit compression on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/lanes.h"
#include "../common/parallel.h"
#include "onebit.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// e <- x + e, and |e| added to the lanes. n is a multiple of the lanes except at the end of the tensor.
void accumulate(const float* __restrict x, float* __restrict e, float* __restrict lanes, int64_t n) {
  int64_t i = 0;
  for (; i + SHORT_LANES <= n; i += SHORT_LANES)
    for (int k = 0; k < SHORT_LANES; ++k) {
      const float c = x[i + k] + e[i + k];
      e[i + k] = c;
      lanes[k] += __builtin_fabsf(c);
    }
  for (int k = 0; i < n; ++i, ++k) {
    e[i] = x[i] + e[i];
    lanes[k] += __builtin_fabsf(e[i]);
  }
}

// Bits of the signs of e, and e <- e - (±scale).
void take_signs(float* __restrict e, uint8_t* __restrict bits, float scale, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale), zero = _mm512_setzero_ps();
  for (; i + 16 <= n; i += 16) {
    const __m512 c = _mm512_loadu_ps(e + i);
    const __mmask16 positive = _mm512_cmp_ps_mask(c, zero, _CMP_GE_OQ);
    _mm512_storeu_ps(e + i, _mm512_sub_ps(c, _mm512_mask_blend_ps(positive, minus, plus)));
    const uint16_t word = uint16_t(positive);
    memcpy(bits + i / 8, &word, 2);
  }
#elif defined(__AVX2__)
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale), zero = _mm256_setzero_ps();
  for (; i + 8 <= n; i += 8) {
    const __m256 c = _mm256_loadu_ps(e + i);
    const __m256 positive = _mm256_cmp_ps(c, zero, _CMP_GE_OQ);
    _mm256_storeu_ps(e + i, _mm256_sub_ps(c, _mm256_blendv_ps(minus, plus, positive)));
    bits[i / 8] = uint8_t(_mm256_movemask_ps(positive));
  }
#endif
  for (; i < n; i += 8) {
    uint32_t byte = 0;
    for (int k = 0; k < 8 && i + k < n; ++k) {
      const float c = e[i + k];
      byte |= uint32_t(c >= 0.0f) << k;
      e[i + k] = c - (c >= 0.0f ? scale : -scale);
    }
    bits[i / 8] = uint8_t(byte);
  }
}

// out <- ±scale, or out + ±scale.
void give_signs(float* __restrict out, const uint8_t* __restrict bits, float scale, bool add, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
  for (; i + 16 <= n; i += 16) {
    uint16_t word;
    memcpy(&word, bits + i / 8, 2);
    const __m512 y = _mm512_mask_blend_ps(__mmask16(word), minus, plus);
    _mm512_storeu_ps(out + i, add ? _mm512_add_ps(_mm512_loadu_ps(out + i), y) : y);
  }
#elif defined(__AVX2__)
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
  const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (; i + 8 <= n; i += 8) {
    const __m256i byte = _mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), place);
    const __m256 y = _mm256_blendv_ps(minus, plus, _mm256_castsi256_ps(_mm256_cmpeq_epi32(byte, place)));
    _mm256_storeu_ps(out + i, add ? _mm256_add_ps(_mm256_loadu_ps(out + i), y) : y);
  }
#endif
  for (; i < n; ++i) {
    const float y = (bits[i / 8] >> (i % 8)) & 1 ? scale : -scale;
    out[i] = add ? out[i] + y : y;
  }
}

// One group, n elements from `offset` on; returns its scale.
float compress_group(const void* x, Dtype dtype, float* error, uint8_t* bits, int64_t offset, int64_t n) {
  alignas(64) float buffer[BLOCK], lanes[SHORT_LANES] = {};
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t count = n - at < BLOCK ? n - at : BLOCK;
    const float* from = fp32_block(x, dtype, offset + at, count, buffer);
    accumulate(from, error + offset + at, lanes, count);
  }
  float sum = lanes[0];
  for (int k = 1; k < SHORT_LANES; ++k) sum += lanes[k];
  const float scale = sum / float(n);
  take_signs(error + offset, bits + offset / 8, scale, n);
  return scale;
}

void decompress_group(void* out, Dtype dtype, const uint8_t* bits, float scale, bool add, int64_t offset, int64_t n) {
  alignas(64) float buffer[BLOCK];
  for (int64_t at = offset; at < offset + n; at += BLOCK) {
    const int64_t count = offset + n - at < BLOCK ? offset + n - at : BLOCK;
    float* to = dtype == F32 || add ? fp32_block(out, dtype, at, count, buffer) : buffer;
    give_signs(to, bits + at / 8, scale, add, count);
    write_block(to, out, dtype, at, count);
  }
}

}  // namespace

void onebit_compress(const void* x, Dtype dtype, float* error, uint8_t* bits, float* scales, int64_t n, int64_t group) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      scales[i] = compress_group(x, dtype, error, bits, i * group, count);
    }
  });
}

void onebit_decompress(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                       int64_t group) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      decompress_group(out, dtype, bits, scales[i], add, i * group, count);
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
