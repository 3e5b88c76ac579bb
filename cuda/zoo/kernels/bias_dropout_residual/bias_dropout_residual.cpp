// Bias, dropout and residual on the CPU. Compiled once for each instruction set.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "bias_dropout_residual.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int64_t COST = 4;             // ten rounds cost as much as several elements of the update do
constexpr int COUNTERS = WIDTH / 2;     // of a vector, one in the lower half of each 64 bits
constexpr int VECTORS = 4;              // that go through the rounds together, so that none waits for a product
constexpr int GROUP = COUNTERS * VECTORS;
constexpr int64_t MORE = 4 * GROUP * 2;  // words beyond a row: it begins and ends within groups that are made together

typedef uint64_t Wide __attribute__((vector_size(8 * COUNTERS)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

// Which counter of its vector element k is: those that follow each other are half a vector apart, as storing wants it.
constexpr int counter_of(int k) { return k / 2 + k % 2 * (COUNTERS / 2); }

// The products of the lower halves with b.
ZOO_HD Wide product(Wide a, uint32_t b) {
  const Wide factor = Wide{} + b;
#if defined(__AVX512BW__)
  return Wide(_mm512_mul_epu32(__m512i(a), __m512i(factor)));
#elif defined(__AVX2__)
  return Wide(_mm256_mul_epu32(__m256i(a), __m256i(factor)));
#elif defined(__SSE2__)
  return Wide(_mm_mul_epu32(__m128i(a), __m128i(factor)));
#else
  return (a & 0xFFFFFFFFu) * factor;
#endif
}

// The words (c0, c1, c2, c3) of each counter of a vector, in the order of the counters.
ZOO_HD void store_words(Wide c0, Wide c1, Wide c2, Wide c3, uint32_t* to) {
  const Wide a = (c0 & 0xFFFFFFFFu) | (c1 << 32), b = (c2 & 0xFFFFFFFFu) | (c3 << 32);
#if defined(__AVX512BW__)
  _mm512_storeu_si512(to, _mm512_unpacklo_epi64(__m512i(a), __m512i(b)));
  _mm512_storeu_si512(to + WIDTH, _mm512_unpackhi_epi64(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_unpacklo_epi64(__m256i(a), __m256i(b)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + WIDTH), _mm256_unpackhi_epi64(__m256i(a), __m256i(b)));
#else
  for (int k = 0; k < COUNTERS; ++k) {
    const uint64_t lower = a[k], upper = b[k];
    memcpy(to + 4 * counter_of(k), &lower, 8);
    memcpy(to + 4 * counter_of(k) + 2, &upper, 8);
  }
#endif
}

// The words of elements [first, first + n), in `memory`, which has room for MORE more.
const uint32_t* words_of(const Philox& g, int64_t first, int64_t n, uint32_t* memory) {
  const uint64_t begin = uint64_t(first) / 4, end = (uint64_t(first + n) + 3) / 4;
  Wide order;
  for (int k = 0; k < COUNTERS; ++k) order[k] = uint64_t(counter_of(k));
  uint32_t* out = memory;
  for (uint64_t at = begin; at < end; at += GROUP, out += 4 * GROUP) {
    Wide c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      c0[v] = order + (at + uint64_t(v * COUNTERS));
      c1[v] = c0[v] >> 32;
      c2[v] = Wide{} + g.offset;
      c3[v] = c2[v] >> 32;
    }
    uint32_t k0 = uint32_t(g.seed), k1 = uint32_t(g.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int v = 0; v < VECTORS; ++v) {  // philox_round; the upper halves of what is not multiplied hold no number
        const Wide p0 = product(c0[v], 0xD2511F53u), p1 = product(c2[v], 0xCD9E8D57u);
        c0[v] = (p1 >> 32) ^ c1[v] ^ k0;
        c1[v] = p1;
        c2[v] = (p0 >> 32) ^ c3[v] ^ k1;
        c3[v] = p0;
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int v = 0; v < VECTORS; ++v) store_words(c0[v], c1[v], c2[v], c3[v], out + v * 4 * COUNTERS);
  }
  return memory + uint64_t(first) % 4;
}

const uint32_t* words_of_row(const BiasDropout& c, int64_t row, uint32_t* memory) {
  return c.threshold == 0 ? memory : words_of(c.generator, c.first + row * c.dim, c.dim, memory);
}

// k·x, +0 where it is dropped; `words`: of these elements.
ZOO_HD Vec kept_of(const BiasDropout& c, Vec x, const uint32_t* words) {
  Words word;
  memcpy(&word, words, sizeof(word));
  const IntVec kept = IntVec(word >= c.threshold);
  return same_bits<Vec>(same_bits<IntVec>(c.scale * x) & (c.scale != 0.0f ? kept : IntVec{}));
}

template <Dtype D>
void forward_row(const BiasDropout& c, int64_t row, const float* b, const uint32_t* words) {
  const int64_t at = row * c.dim;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    const Vec x = load<D>(c.x, at + i, count) + load<F32>(b, i, count);
    store<D>(load<D>(c.residual, at + i, count) + kept_of(c, x, words + i), c.out, at + i, count);
  });
}

template <Dtype D>
void dropout_row(const BiasDropout& c, int64_t row, const uint32_t* words) {
  const int64_t at = row * c.dim;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    store<D>(kept_of(c, load<D>(c.x, at + i, count), words + i), c.out, at + i, count);
  });
}

template <Dtype D>
void backward_row(const BiasDropout& c, int64_t row, float* db, const uint32_t* words) {
  const int64_t at = row * c.dim;
  each_vector(c.dim, [&](int64_t i, int64_t count) {
    const Vec dx = kept_of(c, load<D>(c.x, at + i, count), words + i);
    store<D>(dx, c.out, at + i, count);
    store<F32>(load<F32>(db, i, count) + dx, db, i, count);
  });
}

}  // namespace

void bias_dropout_residual(const BiasDropout& c) {
  const int64_t n = c.dim;
  split_evenly(c.rows, 1, COST * c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(n);
    const Scratch<uint32_t> memory(n + MORE);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t row = begin; row < end; ++row)
        forward_row<decltype(of)::value>(c, row, b, words_of_row(c, row, memory.data()));
    });
  });
}

void bias_dropout_residual_backward(const BiasDropout& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows);
  split_evenly(count, 1, COST * c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<uint32_t> memory(n + MORE);
    each_part(c.rows, first, last, parts, n, [&](int64_t begin, int64_t end, float* part) {
      with_dtype(c.dtype, [&](auto of) {
        for (int64_t row = begin; row < end; ++row)
          backward_row<decltype(of)::value>(c, row, part, words_of_row(c, row, memory.data()));
      });
    });
  });
  sum_parts(parts, count, n, c.grad_bias, c.bias_dtype, n);
}

void dropout(const BiasDropout& c) {
  split_evenly(c.rows, 1, COST * c.rows * c.dim, [&](int64_t begin, int64_t end) {
    const Scratch<uint32_t> memory(c.dim + MORE);
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t row = begin; row < end; ++row)
        dropout_row<decltype(of)::value>(c, row, words_of_row(c, row, memory.data()));
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
