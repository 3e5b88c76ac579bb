// Bias, dropout and residual on the CPU. Compiled once for each instruction set.
#include "../common/columns.h"
#include "../common/scratch.h"
#include "bias_dropout_residual.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int64_t COST = 4;    // ten rounds cost as much as several elements of the update do
constexpr int GROUP = 16;      // counters that go through the rounds together, one a lane
constexpr int64_t MORE = 128;  // words beyond a row: it begins and ends within groups that are made together

// The words of elements [first, first + n), in `memory`, which has room for MORE more.
const uint32_t* words_of(const Philox& g, int64_t first, int64_t n, uint32_t* memory) {
  const uint64_t begin = uint64_t(first) / 4, end = (uint64_t(first + n) + 3) / 4;
  uint32_t* out = memory;
  for (uint64_t at = begin; at < end; at += GROUP, out += 4 * GROUP) {
    uint32_t c0[GROUP], c1[GROUP], c2[GROUP], c3[GROUP];
    for (int k = 0; k < GROUP; ++k) {
      c0[k] = uint32_t(at + uint64_t(k));
      c1[k] = uint32_t((at + uint64_t(k)) >> 32);
      c2[k] = uint32_t(g.offset);
      c3[k] = uint32_t(g.offset >> 32);
    }
    uint32_t k0 = uint32_t(g.seed), k1 = uint32_t(g.seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int k = 0; k < GROUP; ++k) philox_round(c0[k], c1[k], c2[k], c3[k], k0, k1);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int k = 0; k < GROUP; ++k) {
      out[4 * k] = c0[k];
      out[4 * k + 1] = c1[k];
      out[4 * k + 2] = c2[k];
      out[4 * k + 3] = c3[k];
    }
  }
  return memory + uint64_t(first) % 4;
}

const uint32_t* words_of_row(const BiasDropout& c, int64_t row, uint32_t* memory) {
  return c.threshold == 0 ? memory : words_of(c.generator, row * c.dim, c.dim, memory);
}

void forward(float* __restrict out, const float* __restrict x, const float* __restrict b, const float* __restrict r,
             const uint32_t* __restrict words, uint32_t threshold, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = r[i] + dropped(x[i] + b[i], words[i], threshold, scale);
}

void backward(float* __restrict dx, const float* __restrict dy, float* __restrict db, const uint32_t* __restrict words,
              uint32_t threshold, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = dropped(dy[i], words[i], threshold, scale);
    db[i] += dx[i];
  }
}

}  // namespace

void bias_dropout_residual(const BiasDropout& c) {
  const int64_t n = c.dim;
  split_evenly(c.rows, 1, COST * c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(4 * n);
    const Scratch<uint32_t> memory(n + MORE);
    const float* b = fp32_block(c.bias, c.bias_dtype, 0, n, scratch.data());
    for (int64_t row = begin; row < end; ++row) {
      const uint32_t* words = words_of_row(c, row, memory.data());
      const float* x = fp32_block(c.x, c.dtype, row * n, n, scratch.data() + n);
      const float* r = fp32_block(c.residual, c.dtype, row * n, n, scratch.data() + 2 * n);
      float* out = result_block(c.out, c.dtype, row * n, scratch.data() + 3 * n);
      forward(out, x, b, r, words, c.threshold, c.scale, n);
      write_block(out, c.out, c.dtype, row * n, n);
    }
  });
}

void bias_dropout_residual_backward(const BiasDropout& c, float* parts) {
  const int64_t n = c.dim, count = num_parts(c.rows);
  split_evenly(count, 1, COST * c.rows * n, [&](int64_t first, int64_t last) {
    const Scratch<float> scratch(2 * n);
    const Scratch<uint32_t> memory(n + MORE);
    each_part(c.rows, first, last, parts, n, [&](int64_t begin, int64_t end, float* part) {
      for (int64_t row = begin; row < end; ++row) {
        const uint32_t* words = words_of_row(c, row, memory.data());
        const float* dy = fp32_block(c.x, c.dtype, row * n, n, scratch.data());
        float* dx = result_block(c.out, c.dtype, row * n, scratch.data() + n);
        backward(dx, dy, part, words, c.threshold, c.scale, n);
        write_block(dx, c.out, c.dtype, row * n, n);
      }
    });
  });
  sum_parts(parts, count, n, c.grad_bias, c.bias_dtype, n);
}

}  // namespace ZOO_ISA
}  // namespace zoo
