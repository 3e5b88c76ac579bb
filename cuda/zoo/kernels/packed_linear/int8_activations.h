// The product of packed_linear.h with x in 8 bits too: an option, since it changes numbers by more than rounding.
//
//   y_{m,n} = Σ_G (s_{n,G} · Σ_{b in G} d_{m,b} I_{m,n,b} + lo_{n,G} · Σ_{b in G} d_{m,b} X_{m,b}) + b_n
//   I_{m,n,b} = Σ_{k in b} p_{m,k} q_{n,k}, X_{m,b} = Σ_{k in b} p_{m,k}
//
// Each group G of columns is cut into blocks b of 32 from its first on; the last may have 16. In a block of a token
//
//   d = max |x_k| / 127, p_k = round(x_k · (127 / max |x_k|)), to the nearest, ties to even.
//
// A block whose greatest |x| is below 2^-100 is 0. One with an infinite or NaN x makes the token's row of y NaN. The
// gradient of x is that of the product of packed_linear.h: rounding counts as the identity.
//
// Arithmetic. p, q, I and X are integers; |I| <= 32·127·255 < 2^24, so that it is exact in fp32. All else is fp32, each
// product and each sum rounded by itself, in this order:
//
//   t = 0, then t = t + d_b · I_b for the blocks of a group, and likewise z with X_b;
//   y = 0, then y = y + s·t, with minima y = y + lo·z, for the groups; y + b; rounded to the dtype of x.
//
// The order depends on K and G alone, so a row of y depends on its row of x only, and the bits are the same on each
// instruction set, with any number of threads or tokens, on CUDA and in the reference. With u = 2^-24, c the greatest
// code (127, 7, 255 or 15), w = q·s + lo and D_b = d_b/2 · (1 + 2^-14), what rounding x adds is
//
//   |error of y| <= Σ_k D_b |w_{n,k}| + (ceil(G/32) + 2·K/G + 4)·u·Σ_k |x_k| (1 + 2^-6) (c·s + |lo|)
//
// (2^-100 in place of D_b where a block is 0), and one rounding of y. As the Q8 blocks of llama.cpp, whose scales are
// fp16 and whose order of sums is the machine's.
//
// Memory contract. That of packed_linear.h. Of x there is a copy of 1 byte an element and 8 a block, with minima 4 a
// group besides. CPUs read q once for each tile of up to six tokens; CUDA once for each token.
#pragma once

#include "packed_linear.h"

namespace zoo {

constexpr int64_t ACTIVATION_BLOCK = 32;

// x in 8 bits. Blocks of a token lie group after group.
struct Int8Activations {
  int8_t* codes;      // p, (M, K)
  float* scales;      // d, (M, blocks)
  int32_t* sums;      // X, (M, blocks)
  float* group_sums;  // z, (M, K / G); written where there are minima

  ZOO_HD static int64_t blocks_of_group(const PackedWeight& w) { return ceil_div(w.group, ACTIVATION_BLOCK); }
  ZOO_HD static int64_t blocks(const PackedWeight& w) { return w.groups() * blocks_of_group(w); }
};

// y, and x in 8 bits on the way; x, q and y as of packed_linear.
ZOO_KERNEL(packed_linear_int8, const PackedLinear& c, const Int8Activations& x)

inline namespace ZOO_ISA {

// p of `count` numbers value(0), ...; returns d.
template <class Fn>
ZOO_HD float quantise_block(int count, int8_t* to, const Fn& value) {
  uint32_t most = 0;  // the order of magnitudes is that of their bits, NaNs at the end
  for (int i = 0; i < count; ++i) {
    const uint32_t size = bits_of_float(value(i)) & 0x7FFFFFFFu;
    most = size > most ? size : most;
  }
  const float greatest = float_of_bits(most);
  const bool zero = most < (127u - 100u) << 23, bad = most >= 0x7F800000u;
  if (zero || bad) {
    for (int i = 0; i < count; ++i) to[i] = 0;
    return bad ? greatest : 0.0f;  // ∞ · 0 is NaN
  }
  const float inverse = 127.0f / greatest, magic = 12582912.0f;  // 1.5·2^23: what is added to it is rounded at 2^0
  for (int i = 0; i < count; ++i) to[i] = int8_t(bits_of_float(value(i) * inverse + magic) - 0x4B400000u);
  return greatest / 127.0f;
}

}  // namespace ZOO_ISA

}  // namespace zoo
