// A linear layer whose weight W (N, K) is stored in 8 or 4 bits: y = x·Wᵀ + b.
//
//   y_{m,n} = Σ_G (s_{n,G} · Σ_{k in G} x_{m,k} q_{n,k} + lo_{n,G} · Σ_{k in G} x_{m,k}) + b_n
//
// q, s and lo are those of quantise.h, of every row for itself, with groups of G consecutive k; G divides K. Without lo
// where the codes are symmetric. W has no gradient; that of x is dx = dy·W, that of b is Σ_m dy_m.
//
// Arithmetic. Products and sums are fp32, whatever x is; y is rounded once, at the end. Two ways:
//
// - fused: every product is made of the x that was given. On CPUs of x·q, and sums of at most G' elements of a group,
//   even and odd k apart, are multiplied by s; on CUDA of x·w, w as y_i of quantise.h. With u = 2^-24, c the greatest
//   code (127, 7, 255 or 15) and G' = min(G, PIECE):
//     |error of y| <= (G' + ceil(K / G') + 8)·u·Σ_k |x_k| (c·s + 2 |lo|), and one rounding of y.
//   The order of sums depends on K and G alone, neither on N, M nor on the threads, so that a row of y depends on its
//   row of x only. It does depend on the instruction set.
// - by tiles: a tile of W as y_i of quantise.h, for bf16 x rounded to bf16 (2^-9 |w| for each w; on CUDA: to the dtype
// of
//   x), times x by torch. dx is always made so.
//
// With x in 8 bits too, an option of the call: int8_activations.h.
//
// The CPU's fused way takes bf16 dot products where the processor has them (AVX-512 BF16 and VBMI; codes are exact in
// bf16). Those take subnormal x for 0, and give 0 for sums below 2^-126. A y of an infinite or NaN x is infinite or
// NaN; where |x|·c·G' passes 2^128, it may be. A scale or minimum that is infinite or NaN makes its row of y infinite
// or NaN.
//
// Memory order ("packed"). Blocks of 32 rows, from row 0 on; in a block, for each pair of k (0, 1), (2, 3), ... one
// line of 64 bytes (8 bits) or 32 bytes (4 bits):
//   8 bits: the code of row 16h + 4l + j (h < 2, l < 4, j < 4) and of the pair's first (i = 0) or second (i = 1) k
//           is byte 16l + 8h + 2j + i.
//   4 bits: that of row r < 16 is the lower half of byte 2r + i, that of row 16 + r the upper.
// Scales and minima of a block: for each group of K those of 32 rows. The last N mod 32 rows, codes, scales and
// minima, are as quantise writes them: row after row. So q has N·K·bits/8 bytes, scales and minima 4 for each group
// each: what quantise has; pack and unpack only change places.
//
// Memory contract. x (M, K) and y (M, N) contiguous, of one format (fp32, bf16, fp16); b (N,) of any of them; a fused
// call of few tokens reads each byte of q once. Scratch of the fused way: min(M, 528)·K numbers, in each thread 16 KB
// and 128 to 512 bytes for each of these tokens. A tile of W has 4 MB, or 32 rows or columns of fp32.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   packed_linear_kernel 256 threads, <= 128 registers, >= 16 warps
//   packed_rest_kernel 32 threads, <= 64 registers, >= 32 warps
//   packed_columns_kernel 256 threads, <= 56 registers, >= 32 warps
//   packed_int8_codes_kernel 256 threads, <= 40 registers, >= 48 warps
//   packed_int8_sums_kernel 256 threads, <= 40 registers, >= 48 warps
//   packed_int8_kernel 256 threads, <= 64 registers, >= 32 warps
//   packed_int8_rest_kernel 32 threads, <= 64 registers, >= 32 warps
// q begins at a multiple of 16 bytes there.
#pragma once

#include "../common/isa.h"

namespace zoo {

constexpr int64_t PACKED_ROWS = 32;  // of a block

struct PackedWeight {
  const void* q;
  const float *scales, *minima;  // minima: null for symmetric codes
  int64_t rows, columns, group;  // N, K, G
  int32_t bits;

  ZOO_HD int64_t groups() const { return columns / group; }  // of a row
  ZOO_HD int64_t line_bytes() const { return 8 * bits; }
};

struct PackedLinear {
  PackedWeight w;
  const void *x, *bias;  // bias: null without one
  void* y;
  int64_t tokens;  // M
  Dtype dtype, bias_dtype;
};

// The fused way. On CUDA at most PACKED_TOKENS tokens.
ZOO_KERNEL(packed_linear, const PackedLinear& c)
// Columns [begin, begin + count) of rows [row, row + num_rows), transposed: out (count, num_rows). row, begin and count
// are multiples of 32, 2 and 2.
ZOO_KERNEL(packed_columns, const PackedWeight& w, void* out, Dtype dtype, int64_t row, int64_t num_rows, int64_t begin,
           int64_t count)

constexpr int64_t PACKED_TOKENS = 16;

// How many tokens the fused way is the faster one for, on the processor and instruction set in use.
ZOO_CPU_KERNEL(packed_most_tokens, Dtype dtype, int64_t& tokens)

inline namespace ZOO_ISA {

// The byte of a line that has the code of a row of the block and of the pair's k number i; 4 bits: half of it.
ZOO_HD constexpr int place_in_line(int bits, int row, int i) {
  return bits == 8 ? row % 16 / 4 * 16 + row / 16 * 8 + row % 4 * 2 + i : row % 16 * 2 + i;
}

}  // namespace ZOO_ISA

}  // namespace zoo
