// Numbers by place on the CPU: 16 counters at a time, round by round. Compiled once for each instruction set.
#include "uniform.h"

#include "../common/parallel.h"
#include "../common/philox.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

constexpr int TOGETHER = 16;

// The words of `TOGETHER` counters from `first` on: word[k][j] is word k of counter first + j.
void words_of(const Uniform& c, uint64_t place, int64_t first, uint32_t word[4][TOGETHER]) {
  for (int j = 0; j < TOGETHER; ++j) {
    const uint64_t index = uint64_t(first + j);
    word[0][j] = uint32_t(index);
    word[1][j] = uint32_t(index >> 32);
    word[2][j] = uint32_t(place);
    word[3][j] = uint32_t(place >> 32);
  }
  uint32_t k0 = uint32_t(c.seed), k1 = uint32_t(c.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int j = 0; j < TOGETHER; ++j) philox_round(word[0][j], word[1][j], word[2][j], word[3][j], k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace

void uniform(const Uniform& c) {
  const int64_t blocks = c.blocks(), groups = ceil_div(blocks, int64_t(TOGETHER));
  split_evenly(c.rows * groups, 1, c.rows * c.count, [&](int64_t begin, int64_t end) {
    uint32_t word[4][TOGETHER];
    for (int64_t at = begin; at < end; ++at) {
      const int64_t row = at / groups, first = at % groups * TOGETHER;
      words_of(c, uint64_t(c.places[row]), first, word);
      double* const to = c.u + row * c.count + 4 * first;
      const int64_t left = c.count - 4 * first;
      for (int j = 0; j < TOGETHER; ++j)
        for (int k = 0; k < 4 && 4 * j + k < left; ++k) to[4 * j + k] = (double(word[k][j]) + 0.5) * 0x1p-32;
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
