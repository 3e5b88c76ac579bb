// Blocks of 32 rows of a packed weight on CPUs, the last rows included, and what is written of them.
#pragma once

#include "../common/blocks.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "packed_linear.h"

namespace zoo {
inline namespace ZOO_ISA {

constexpr int64_t ROWS = PACKED_ROWS;

ZOO_HD int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

struct Block {
  const uint8_t* lines;
  const float *scales, *minima;  // [group][32]
  int64_t row, rows;
};

// The last rows of W, which are not a whole block, in the order of one; zeros for the rows that are not there.
class Rest {
 public:
  explicit Rest(const PackedWeight& w)
      : row_(w.rows / ROWS * ROWS),
        rows_(w.rows - row_),
        lines_(rows_ > 0 ? w.columns / 2 * w.line_bytes() : 0),
        of_groups_(rows_ > 0 ? 2 * w.groups() * ROWS : 0) {
    if (rows_ == 0) return;
    uint8_t* const lines = lines_.data();
    memset(lines, 0, size_t(w.columns / 2 * w.line_bytes()));
    const uint8_t* from = static_cast<const uint8_t*>(w.q) + row_ * w.columns * w.bits / 8;
    for (int r = 0; r < rows_; ++r)
      for (int64_t pair = 0; pair < w.columns / 2; ++pair) {
        uint8_t* const line = lines + pair * w.line_bytes();
        for (int i = 0; i < 2; ++i) {
          if (w.bits == 8) line[place_in_line(8, r, i)] = *from++;
          else line[place_in_line(4, r, i)] |= uint8_t(((*from >> 4 * i) & 15) << (r / 16 * 4));
        }
        if (w.bits == 4) ++from;
      }
    place(w.scales, w.groups(), of_groups_.data());
    if (w.minima != nullptr) place(w.minima, w.groups(), of_groups_.data() + w.groups() * ROWS);
  }

  Block block(const PackedWeight& w) const {
    const float* const minima = w.minima == nullptr ? nullptr : of_groups_.data() + w.groups() * ROWS;
    return {lines_.data(), of_groups_.data(), minima, row_, rows_};
  }

 private:
  void place(const float* from, int64_t groups, float* to) const {
    memset(to, 0, size_t(groups * ROWS) * 4);
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t g = 0; g < groups; ++g) to[g * ROWS + r] = from[(row_ + r) * groups + g];
  }

  int64_t row_, rows_;
  Scratch<uint8_t> lines_;
  Scratch<float> of_groups_;
};

ZOO_HD Block block_of(const PackedWeight& w, const Rest& rest, int64_t index) {
  const int64_t row = index * ROWS, of_group = row * w.groups();
  if (row + ROWS > w.rows) return rest.block(w);
  return {static_cast<const uint8_t*>(w.q) + row * w.columns * w.bits / 8, w.scales + of_group,
          w.minima == nullptr ? nullptr : w.minima + of_group, row, ROWS};
}

// y of the tokens from `token` on and the rows of a block; c has `stride` numbers a token.
inline void write(const PackedLinear& c, const float* sums, int64_t stride, const Block& block, int64_t token,
                  int64_t count) {
  float bias[ROWS];
  if (c.bias != nullptr && c.bias_dtype == F32)
    memcpy(bias, static_cast<const float*>(c.bias) + block.row, size_t(block.rows) * 4);
  else if (c.bias != nullptr) widen(static_cast<const uint16_t*>(c.bias) + block.row, bias, c.bias_dtype, block.rows);
  with_dtype(c.dtype, [&](auto of) {
    constexpr Dtype D = decltype(of)::value;
    for (int64_t m = 0; m < count; ++m)
      for (int64_t r = 0; r < block.rows; r += WIDTH) {
        const int64_t num = lesser(WIDTH, block.rows - r);
        Vec y = load<F32>(sums, m * stride + r);
        if (c.bias != nullptr) y = y + load<F32>(bias, r, num);
        store<D>(y, c.y, (token + m) * c.w.rows + block.row + r, num);
      }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
