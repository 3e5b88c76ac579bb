// Quantisation on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/vectors.h"
#include "quantise.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// max |x|, a NaN if there is one: without its sign a number grows with its bits, and a NaN is above infinity.
template <Dtype D>
float largest(const void* x, int64_t offset, int64_t n) {
  if constexpr (D == F32) {
    const float* from = static_cast<const float*>(x) + offset;
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = int32_t(bits_of_float(from[i]) & 0x7FFFFFFFu);
      most = bits > most ? bits : most;
    }
    return float_of_bits(uint32_t(most));
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(x) + offset;
    int16_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int16_t bits = int16_t(from[i] & 0x7FFFu);
      most = bits > most ? bits : most;
    }
    return D == BF16 ? bf16_to_float(uint16_t(most)) : f16_to_float(uint16_t(most));
  }
}

// The codes of a group count steps of span / Q from `zero` on.
struct Span {
  float zero, span;
};

// lo and hi - lo. Negative numbers with all bits but the sign inverted, so that integers are ordered as the numbers
// are: -0 below +0, a NaN beyond an infinity; so it is lo or hi, and the span is a NaN.
template <Dtype D>
Span range_of(const void* x, int64_t offset, int64_t n) {
  typedef std::conditional_t<D == F32, int32_t, int16_t> Bits;
  constexpr int sign = 8 * int(sizeof(Bits)) - 1;
  constexpr Bits most = Bits(uint32_t(0xFFFFFFFF) >> (32 - sign));
  const auto ordered = [](Bits bits) { return Bits(bits ^ ((bits >> sign) & most)); };
  const auto number = [&](Bits bits) {
    if constexpr (D == F32) return float_of_bits(uint32_t(ordered(bits)));
    else return D == BF16 ? bf16_to_float(uint16_t(ordered(bits))) : f16_to_float(uint16_t(ordered(bits)));
  };
  const char* const from = static_cast<const char*>(x) + offset * int64_t(sizeof(Bits));
  Bits low = most, high = Bits(~most);
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    memcpy(&bits, from + i * int64_t(sizeof(Bits)), sizeof(Bits));
    bits = ordered(bits);
    low = bits < low ? bits : low;
    high = bits > high ? bits : high;
  }
  return {number(low), number(high) - number(low)};
}

// The codes of x[i, i + count), 0 beyond, in the lower eight bits of each number. Adding 1.5·2^23 leaves no room for a
// fraction: the addition rounds to nearest, ties to even. 0·∞, in groups whose Q / span overflows, is a NaN with these
// bits 0.
template <Dtype D, bool SYMMETRIC>
ZOO_HD IntVec codes_of(const void* x, int64_t i, int64_t count, float zero, float inverse, float limit) {
  const Vec v = load<D>(x, i, count);
  Vec t = less_of(spread(limit), inverse * (SYMMETRIC ? v : first_of(v, count, zero) - zero));
  if (SYMMETRIC) t = greater_of(spread(-limit), t);
  return same_bits<IntVec>(t + 12582912.0f);
}

// The lower eight bits of the first `count` numbers.
ZOO_HD void store_bytes(IntVec codes, int8_t* to, int64_t count) {
  int8_t part[WIDTH];
  int8_t* const whole = count == WIDTH ? to : part;
#if defined(__AVX512BW__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(whole), _mm512_cvtepi32_epi8(__m512i(codes)));
#elif defined(__AVX2__)
  const __m256i lowest = _mm256_set1_epi32(0x0C080400), each = _mm256_shuffle_epi8(__m256i(codes), lowest);
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(whole), both);
#else
  for (int k = 0; k < WIDTH; ++k) whole[k] = int8_t(codes[k]);
#endif
  if (count != WIDTH) memcpy(to, part, size_t(count));
}

// Two codes of each 16 bits into one byte.
void pack(const int8_t* __restrict codes, int8_t* __restrict out, int64_t bytes) {
  for (int64_t j = 0; j < bytes; ++j) {
    uint16_t two;
    memcpy(&two, codes + 2 * j, 2);
    out[j] = int8_t((two & 15) | ((two >> 4) & 0xF0));
  }
}

// n elements of x from `offset` on become one group at q; returns its zero, and its scale as the span.
template <Dtype D, int BITS, bool SYMMETRIC>
Span quantise_group(const void* x, int8_t* q, int64_t offset, int64_t n) {
  constexpr float limit = code_limit(BITS, SYMMETRIC);
  const Span found = SYMMETRIC ? Span{0.0f, largest<D>(x, offset, n)} : range_of<D>(x, offset, n);
  const float zero = found.zero, inverse = limit / found.span;
  if (!(found.span < __builtin_huge_valf())) {
    memset(q, 0, size_t(ceil_div(n * BITS, 8)));
  } else if constexpr (BITS == 8) {
    each_vector(n, [&](int64_t i, int64_t count) {
      store_bytes(codes_of<D, SYMMETRIC>(x, offset + i, count, zero, inverse, limit), q + i, count);
    });
  } else {
    alignas(64) int8_t codes[BLOCK + WIDTH];
    for (int64_t at = 0; at < n; at += BLOCK) {
      const int64_t m = n - at < BLOCK ? n - at : BLOCK;
      each_vector(m, [&](int64_t i, int64_t count) {
        store_bytes(codes_of<D, SYMMETRIC>(x, offset + at + i, count, zero, inverse, limit), codes + i, WIDTH);
      });
      pack(codes, q + at / 2, (m + 1) / 2);
    }
  }
  return {zero, found.span / limit};
}

template <Dtype D, int BITS, bool SYMMETRIC>
void quantise_groups(const void* x, int8_t* q, float* scales, float* minima, int64_t n, int64_t group,
                     const Swizzle& swizzle) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group, to = swizzle.place(i);
      const Span found = quantise_group<D, BITS, SYMMETRIC>(x, q + to * group * BITS / 8, i * group, count);
      scales[to] = found.span;
      if (!SYMMETRIC) minima[to] = found.zero;
    }
  });
}

// acc <- first ? y : acc + y
template <bool SYMMETRIC>
void add_scaled(float* __restrict acc, const int8_t* __restrict q, int bits, float scale, float zero, bool first,
                int64_t n) {
  alignas(64) float y[BLOCK];
  const auto number = [=](int32_t code) { return SYMMETRIC ? scale * float(code) : scale * float(code) + zero; };
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) y[i] = number(SYMMETRIC ? q[i] : uint8_t(q[i]));
  } else {
    for (int64_t j = 0; j < (n + 1) / 2; ++j) {
      const int32_t byte = q[j];  // symmetric: four bits with their sign
      y[2 * j] = number(SYMMETRIC ? int32_t(uint32_t(byte) << 28) >> 28 : byte & 15);
      y[2 * j + 1] = number(SYMMETRIC ? byte >> 4 : (byte >> 4) & 15);
    }
  }
  for (int64_t i = 0; i < n; ++i) acc[i] = first ? y[i] : acc[i] + y[i];
}

// Elements [offset, offset + n), all of one group, summed over `ranks` quantised tensors of `stride` bytes each.
template <bool SYMMETRIC>
void dequantise_group(void* out, Dtype dtype, int bits, const int8_t* q, int64_t stride, const float* scales,
                      const float* minima, int64_t scale_stride, int64_t ranks, float factor, int64_t offset,
                      int64_t n) {
  alignas(64) float acc[BLOCK];
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t count = n - at < BLOCK ? n - at : BLOCK, from = (offset + at) * bits / 8;
    for (int64_t r = 0; r < ranks; ++r) {
      const float zero = SYMMETRIC ? 0.0f : minima[r * scale_stride];
      add_scaled<SYMMETRIC>(acc, q + r * stride + from, bits, scales[r * scale_stride], zero, r == 0, count);
    }
    if (factor != 1.0f)
      for (int64_t i = 0; i < count; ++i) acc[i] = factor * acc[i];
    narrow(acc, out, dtype, offset + at, count);
  }
}

template <bool SYMMETRIC>
void dequantise_groups(void* out, Dtype dtype, int bits, const int8_t* q, const float* scales, const float* minima,
                       int64_t ranks, float factor, int64_t n, int64_t group) {
  const int64_t groups = ceil_div(n, group), stride = ceil_div(n * bits, 8);
  split_evenly(groups, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      dequantise_group<SYMMETRIC>(out, dtype, bits, q, stride, scales + i, SYMMETRIC ? nullptr : minima + i, groups,
                                  ranks, factor, i * group, count);
    }
  });
}

}  // namespace

void quantise(const void* x, Dtype dtype, int32_t bits, void* q, float* scales, float* minima, int64_t n, int64_t group,
              const Swizzle& swizzle) {
  with_dtype(dtype, [&](auto of) {
    constexpr Dtype D = decltype(of)::value;
    const auto run = minima == nullptr ? bits == 8 ? quantise_groups<D, 8, true> : quantise_groups<D, 4, true>
                     : bits == 8       ? quantise_groups<D, 8, false>
                                       : quantise_groups<D, 4, false>;
    run(x, static_cast<int8_t*>(q), scales, minima, n, group, swizzle);
  });
}

void dequantise(void* out, Dtype dtype, int32_t bits, const void* q, const float* scales, const float* minima,
                int64_t ranks, float factor, int64_t n, int64_t group) {
  const auto run = minima == nullptr ? dequantise_groups<true> : dequantise_groups<false>;
  run(out, dtype, bits, static_cast<const int8_t*>(q), scales, minima, ranks, factor, n, group);
}

}  // namespace ZOO_ISA
}  // namespace zoo
