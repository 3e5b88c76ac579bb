// 1-bit compression on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/lanes.h"
#include "../common/parallel.h"
#include "onebit.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// c <- c + e, where there is an e, and |c| added to the lanes. n is a multiple of the lanes except at the end of the tensor.
void accumulate(float* __restrict c, const float* __restrict e, float* __restrict lanes, int64_t n) {
  int64_t i = 0;
  if (e != nullptr)
    for (; i < n; ++i) c[i] = c[i] + e[i];
  for (i = 0; i + SHORT_LANES <= n; i += SHORT_LANES)
    for (int k = 0; k < SHORT_LANES; ++k) lanes[k] += __builtin_fabsf(c[i + k]);
  for (int k = 0; i < n; ++i, ++k) lanes[k] += __builtin_fabsf(c[i]);
}

// Bits of the signs of c.
void take_signs(const float* __restrict c, uint8_t* __restrict bits, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  for (; i + 16 <= n; i += 16) {
    const uint16_t word = uint16_t(_mm512_cmp_ps_mask(_mm512_loadu_ps(c + i), _mm512_setzero_ps(), _CMP_GE_OQ));
    memcpy(bits + i / 8, &word, 2);
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8)
    bits[i / 8] = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(c + i), _mm256_setzero_ps(), _CMP_GE_OQ)));
#endif
  for (; i < n; i += 8) {
    uint32_t byte = 0;
    for (int k = 0; k < 8 && i + k < n; ++k) byte |= uint32_t(c[i + k] >= 0.0f) << k;
    bits[i / 8] = uint8_t(byte);
  }
}

// out <- ±scale, or from + ±scale where there is a `from`, which may be `out`.
void give_signs(float* out, const float* from, const uint8_t* __restrict bits, float scale, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
  for (; i + 16 <= n; i += 16) {
    uint16_t word;
    memcpy(&word, bits + i / 8, 2);
    const __m512 y = _mm512_mask_blend_ps(__mmask16(word), minus, plus);
    _mm512_storeu_ps(out + i, from != nullptr ? _mm512_add_ps(_mm512_loadu_ps(from + i), y) : y);
  }
#elif defined(__AVX2__)
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
  const __m256i place = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (; i + 8 <= n; i += 8) {
    const __m256i byte = _mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), place);
    const __m256 y = _mm256_blendv_ps(minus, plus, _mm256_castsi256_ps(_mm256_cmpeq_epi32(byte, place)));
    _mm256_storeu_ps(out + i, from != nullptr ? _mm256_add_ps(_mm256_loadu_ps(from + i), y) : y);
  }
#endif
  for (; i < n; ++i) {
    const float y = (bits[i / 8] >> (i % 8)) & 1 ? scale : -scale;
    out[i] = from != nullptr ? from[i] + y : y;
  }
}

// One group, n elements from `offset` on; returns its scale.
float compress_group(void* x, Dtype dtype, const float* error, uint8_t* bits, int64_t offset, int64_t n) {
  alignas(64) float buffer[BLOCK], lanes[SHORT_LANES] = {};
  for (int64_t at = offset; at < offset + n; at += BLOCK) {
    const int64_t count = offset + n - at < BLOCK ? offset + n - at : BLOCK;
    float* c = fp32_block(x, dtype, at, count, buffer);
    accumulate(c, error == nullptr ? nullptr : error + at, lanes, count);
    take_signs(c, bits + at / 8, count);
  }
  float sum = lanes[0];
  for (int k = 1; k < SHORT_LANES; ++k) sum += lanes[k];
  return sum / float(n);
}

void decompress_group(void* out, Dtype dtype, const uint8_t* bits, float scale, bool add, int64_t offset, int64_t n) {
  alignas(64) float buffer[BLOCK];
  for (int64_t at = offset; at < offset + n; at += BLOCK) {
    const int64_t count = offset + n - at < BLOCK ? offset + n - at : BLOCK;
    float* to = dtype == F32 || add ? fp32_block(out, dtype, at, count, buffer) : buffer;
    give_signs(to, add ? to : nullptr, bits + at / 8, scale, count);
    write_block(to, out, dtype, at, count);
  }
}

// f(scale index, offset, count) for each group.
template <class F>
void for_groups(int64_t n, int64_t group, F f) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i, i * group, (i + 1) * group < n ? group : n - i * group);
  });
}

}  // namespace

void onebit_compress(void* x, Dtype dtype, const float* error, uint8_t* bits, float* scales, int64_t n, int64_t group) {
  for_groups(n, group, [&](int64_t i, int64_t offset, int64_t count) {
    scales[i] = compress_group(x, dtype, error, bits, offset, count);
  });
}

void onebit_owed(float* error, const float* c, const uint8_t* bits, const float* scales, int64_t n, int64_t group) {
  for_groups(n, group, [&](int64_t i, int64_t offset, int64_t count) {
    // c - y is c + (-y) to the last bit.
    give_signs(error + offset, c + offset, bits + offset / 8, -scales[i], count);
  });
}

void onebit_decompress(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                       int64_t group) {
  for_groups(n, group, [&](int64_t i, int64_t offset, int64_t count) {
    decompress_group(out, dtype, bits, scales[i], add, offset, count);
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
