// Bias, dropout and residual on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "bias_dropout_residual_cpu.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int GROUP = 16;  // counters that go through the rounds together, one a lane

// The words of elements [first, first + n), in `memory`, which has room for DROPOUT_MORE more.
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

const float* row_of(const void* memory, Dtype dtype, int64_t row, int64_t dim, float* buffer) {
  return fp32_block(const_cast<void*>(memory), dtype, row * dim, dim, buffer);
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

void bias_dropout_rows(const BiasDropout& c, int64_t begin, int64_t end, float* scratch, uint32_t* memory) {
  const int64_t n = c.dim;
  const float* b = row_of(c.bias, c.bias_dtype, 0, n, scratch);
  for (int64_t row = begin; row < end; ++row) {
    const uint32_t* words = words_of_row(c, row, memory);
    const float* x = row_of(c.x, c.dtype, row, n, scratch + n);
    const float* r = row_of(c.residual, c.dtype, row, n, scratch + 2 * n);
    float* out = c.dtype == F32 ? static_cast<float*>(c.out) + row * n : scratch + 3 * n;
    forward(out, x, b, r, words, c.threshold, c.scale, n);
    write_block(out, c.out, c.dtype, row * n, n);
  }
}

void bias_dropout_backward_rows(const BiasDropout& c, int64_t begin, int64_t end, float* scratch, uint32_t* memory,
                                float* part) {
  const int64_t n = c.dim;
  for (int64_t row = begin; row < end; ++row) {
    const uint32_t* words = words_of_row(c, row, memory);
    const float* dy = row_of(c.x, c.dtype, row, n, scratch);
    float* dx = c.dtype == F32 ? static_cast<float*>(c.out) + row * n : scratch + n;
    backward(dx, dy, part, words, c.threshold, c.scale, n);
    write_block(dx, c.out, c.dtype, row * n, n);
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
