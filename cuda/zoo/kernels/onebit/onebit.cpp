// 1-bit compression on the CPU. Compiled once for each instruction set.
#include "onebit.h"
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/vectors.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// From this size on, what is written goes past the caches, which would read it first and not keep it.
constexpr int64_t STREAMED = 16 << 20;
constexpr int PARTS = SHORT_LANES / WIDTH;  // vectors of the lanes

bool goes_past_caches(const void* to, int64_t n) {
#if defined(__SSE2__)
  return 4 * n >= STREAMED && reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0;
#else
  return false;
#endif
}

ZOO_HD void put(Vec v, float* to, [[maybe_unused]] bool past) {
#if defined(__AVX512BW__)
  if (past) return _mm512_stream_ps(to, __m512(v));
#elif defined(__AVX2__)
  if (past) return _mm256_stream_ps(to, __m256(v));
#elif defined(__SSE2__)
  if (past) return _mm_stream_ps(to, __m128(v));
#endif
  memcpy(to, &v, sizeof(v));
}

// What was written past the caches is in memory before a thread goes on.
void finish_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Element k is `plus` where bit k is 1, else `minus`.
ZOO_HD Vec chosen(uint32_t bits, Vec plus, Vec minus) {
#if defined(__AVX512BW__)
  return Vec(_mm512_mask_blend_ps(__mmask16(bits), __m512(minus), __m512(plus)));
#else
  IntVec place;
  for (int k = 0; k < WIDTH; ++k) place[k] = 1 << k;
  return ((IntVec{} + int32_t(bits)) & place) == place ? plus : minus;
#endif
}

// Bit k is 1 where element k is at least 0.
ZOO_HD uint32_t signs_of(Vec x) {
#if defined(__AVX512BW__)
  return _mm512_cmp_ps_mask(__m512(x), _mm512_setzero_ps(), _CMP_GE_OQ);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(__m256(x), _mm256_setzero_ps(), _CMP_GE_OQ)));
#elif defined(__SSE2__)
  return uint32_t(_mm_movemask_ps(_mm_cmpge_ps(__m128(x), _mm_setzero_ps())));
#else
  uint32_t bits = 0;
  for (int k = 0; k < WIDTH; ++k) bits |= uint32_t(x[k] >= 0.0f) << k;
  return bits;
#endif
}

ZOO_HD Vec magnitude_of(Vec x) { return same_bits<Vec>(same_bits<IntVec>(x) & 0x7FFFFFFF); }

ZOO_HD uint32_t word_at(const uint8_t* bits, int64_t i) {
  uint16_t word;
  memcpy(&word, bits + i / 8, 2);
  return word;
}

ZOO_HD float sign_at(const uint8_t* bits, int64_t i, float scale) {
  return (bits[i / 8] >> (i % 8)) & 1 ? scale : -scale;
}

// out <- ±scale, or from + ±scale where there is a `from`, which may be `out`.
ZOO_HD void give_signs(float* out, const float* from, const uint8_t* bits, float scale, bool past, int64_t n) {
  const Vec plus = spread(scale), minus = spread(-scale);
  int64_t i = 0;
  for (; i + SHORT_LANES <= n; i += SHORT_LANES) {
    const uint32_t word = word_at(bits, i);
#pragma GCC unroll 16
    for (int k = 0; k < PARTS; ++k) {
      const Vec y = chosen(word >> (k * WIDTH), plus, minus);
      put(from != nullptr ? load<F32>(from, i + k * WIDTH) + y : y, out + i + k * WIDTH, past);
    }
  }
  for (; i < n; ++i) {
    const float y = sign_at(bits, i, scale);
    out[i] = from != nullptr ? from[i] + y : y;
  }
}

// What earlier steps owe: e, or what bits and a scale leave out of it; all null for nothing.
struct Owed {
  const float* e;
  const uint8_t* bits;
  float scale;
};

// What is given from some element on: fp32 in memory, or the mean of what wires stand for.
struct Numbers {
  const float* x;
  Vec vector(int64_t i) const { return load<F32>(x, i); }
  float one(int64_t i) const { return x[i]; }
};

struct MeanOfWires {
  const uint8_t *scales, *bits;  // of the first wire
  int64_t stride, ranks;
  float factor;

  float scale_of(int64_t r) const {
    float scale;
    memcpy(&scale, scales + r * stride, 4);
    return scale;
  }
  Vec vector(int64_t i) const {
    Vec sum = signed_scale(0, i);
    for (int64_t r = 1; r < ranks; ++r) sum = sum + signed_scale(r, i);
    return sum * spread(factor);
  }
  Vec signed_scale(int64_t r, int64_t i) const {
    const float scale = scale_of(r);
    const int64_t past = i % SHORT_LANES;
    return chosen(word_at(bits + r * stride, i - past) >> past, spread(scale), spread(-scale));
  }
  float one(int64_t i) const {
    float sum = sign_at(bits, i, scale_of(0));
    for (int64_t r = 1; r < ranks; ++r) sum = sum + sign_at(bits + r * stride, i, scale_of(r));
    return sum * factor;
  }
};

// c <- x + what is owed, where there is a c; |c| added to the lanes; bits <- its signs. n is a multiple of the lanes
// except at the end of the tensor.
template <bool OWED, bool SENT, class X>
void compress_block(float* c, const X& x, const Owed& owed, float* lanes, uint8_t* bits, bool past, int64_t n) {
  const Vec plus = spread(owed.scale), minus = spread(-owed.scale);
  Vec sums[PARTS];
  memcpy(sums, lanes, sizeof(sums));
  int64_t i = 0;
  for (; i + SHORT_LANES <= n; i += SHORT_LANES) {
    const uint32_t before = SENT ? word_at(owed.bits, i) : 0;
    uint32_t word = 0;
#pragma GCC unroll 16
    for (int k = 0; k < PARTS; ++k) {
      const int64_t at = i + k * WIDTH;
      Vec v = x.vector(at);
      if constexpr (OWED) {
        Vec e = load<F32>(owed.e, at);
        if constexpr (SENT) e = e - chosen(before >> (k * WIDTH), plus, minus);
        v = v + e;
      }
      if (c != nullptr) put(v, c + at, past);
      sums[k] = sums[k] + magnitude_of(v);
      word |= signs_of(v) << (k * WIDTH);
    }
    const uint16_t two = uint16_t(word);
    memcpy(bits + i / 8, &two, 2);
  }
  memcpy(lanes, sums, sizeof(sums));
  for (int64_t k = i; k < n; ++k) {
    float v = x.one(k);
    if constexpr (OWED) v = v + (SENT ? owed.e[k] - sign_at(owed.bits, k, owed.scale) : owed.e[k]);
    if (c != nullptr) c[k] = v;
    lanes[k - i] += __builtin_fabsf(v);
    bits[k / 8] = uint8_t((k % 8 == 0 ? 0 : bits[k / 8]) | (v >= 0.0f) << (k % 8));
  }
}

// f(scale index, offset, count) for each group.
template <class F>
void for_groups(int64_t n, int64_t group, F f) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i, i * group, (i + 1) * group < n ? group : n - i * group);
    finish_stores();
  });
}

// x(scale index, offset, count, buffer) is what is given from the offset on.
template <class X>
void compress(float* c, const X& x, const float* error, const uint8_t* sent_bits, const float* sent_scales,
              uint8_t* bits, float* scales, bool past, int64_t n, int64_t group) {
  using Given = decltype(x(0, 0, 0, nullptr));
  const auto block = error == nullptr       ? compress_block<false, false, Given>
                     : sent_bits == nullptr ? compress_block<true, false, Given>
                                            : compress_block<true, true, Given>;
  past = past && c != nullptr && c != error && goes_past_caches(c, n);
  for_groups(n, group, [&](int64_t index, int64_t offset, int64_t size) {
    alignas(64) float buffer[BLOCK], lanes[SHORT_LANES] = {};
    for (int64_t at = offset; at < offset + size; at += BLOCK) {
      const int64_t count = offset + size - at < BLOCK ? offset + size - at : BLOCK;
      const Owed owed = {error == nullptr ? nullptr : error + at, sent_bits == nullptr ? nullptr : sent_bits + at / 8,
                         sent_bits == nullptr ? 0.0f : sent_scales[index]};
      block(c == nullptr ? nullptr : c + at, x(index, at, count, buffer), owed, lanes, bits + at / 8, past, count);
    }
    float sum = lanes[0];
    for (int k = 1; k < SHORT_LANES; ++k) sum += lanes[k];
    scales[index] = sum / float(size);
  });
}

}  // namespace

void onebit_compress(float* c, const void* x, Dtype dtype, const float* error, const uint8_t* sent_bits,
                     const float* sent_scales, uint8_t* bits, float* scales, int64_t n, int64_t group) {
  const auto given = [&](int64_t, int64_t at, int64_t count, float* buffer) {
    return Numbers{fp32_block(x, dtype, at, count, buffer)};
  };
  compress(c, given, error, sent_bits, sent_scales, bits, scales, c != x, n, group);
}

void onebit_compress_mean(float* c, const uint8_t* wires, int64_t stride, int64_t ranks, float factor,
                          const float* error, const uint8_t* sent_bits, const float* sent_scales, uint8_t* bits,
                          float* scales, int64_t n, int64_t group) {
  const int64_t head = 4 * ceil_div(n, group);
  const auto mean = [&](int64_t index, int64_t at, int64_t, float*) {
    return MeanOfWires{wires + 4 * index, wires + head + at / 8, stride, ranks, factor};
  };
  compress(c, mean, error, sent_bits, sent_scales, bits, scales, true, n, group);
}

void onebit_owed(float* error, const float* c, const uint8_t* bits, const float* scales, int64_t n, int64_t group) {
  const bool past = error != c && goes_past_caches(error, n);
  for_groups(n, group, [&](int64_t i, int64_t offset, int64_t count) {
    // c - y is c + (-y) to the last bit.
    give_signs(error + offset, c + offset, bits + offset / 8, -scales[i], past, count);
  });
}

void onebit_decompress(void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
                       int64_t group) {
  const bool past = dtype == F32 && !add && goes_past_caches(out, n);
  for_groups(n, group, [&](int64_t index, int64_t offset, int64_t size) {
    alignas(64) float buffer[BLOCK];
    for (int64_t at = offset; at < offset + size; at += BLOCK) {
      const int64_t count = offset + size - at < BLOCK ? offset + size - at : BLOCK;
      float* to = dtype == F32 || add ? fp32_block(out, dtype, at, count, buffer) : buffer;
      give_signs(to, add ? to : nullptr, bits + at / 8, scales[index], past, count);
      write_block(to, out, dtype, at, count);
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
