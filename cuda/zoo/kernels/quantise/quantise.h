// Group-wise quantisation to 8 and 4 bits, symmetric and asymmetric.
//
// Symmetric:
//
//   Q    = 127 (int8) or 7 (int4)
//   s_G  = max_{i in G} |x_i| / Q            one fp32 scale for each group G of consecutive elements
//   q_i  = round(x_i · (Q / max_G |x|))      to nearest, ties to even, within [-Q, Q]
//   y_i  = q_i · s_G                         |x_i - y_i| <= s_G / 2 · (1 + 2^-21) + 2^-22 |x_i| + 2^-120
//
// A group with max |x| < Q / FLT_MAX, which is below 2^-120, has the codes -Q, 0 and Q alone.
//
// Asymmetric, for numbers that do not lie around zero:
//
//   Q    = 255 or 15
//   lo_G = min_{i in G} x_i,  hi_G = max_{i in G} x_i     one fp32 minimum for each group besides
//   s_G  = (hi_G - lo_G) / Q
//   q_i  = round((x_i - lo_G) · (Q / (hi_G - lo_G)))      to nearest, ties to even, within [0, Q]
//   y_i  = q_i · s_G + lo_G                  |x_i - y_i| <= s_G / 2 · (1 + 2^-12) + 2^-23 |x_i| + 2^-120
//
// One division a group, none an element. The least element arrives exactly, the greatest up to the roundings of y; a
// group of equal numbers has s = 0 and q = 0 and arrives exactly. A group with hi - lo < Q / FLT_MAX, which is below
// 2^-120, has the codes 0 and Q alone.
//
// Both:
//
//   reduced_i = f · Σ_r y_{r,i}              dequantise-reduce: r = 0, 1, … in order, fp32, then the factor f
//
// 4 bits: element 2j in the lower half of byte j, element 2j + 1 in the upper; symmetric codes are two's complement. A
// group of zeros has scale 0. A NaN or infinity, or hi - lo above FLT_MAX, makes the group's scale or minimum NaN or
// infinite and its q zero, so the receiver gets NaN, not a number. Of two zeros, lo is -0.
//
// Swizzled layout (ZeRO++ qgZ): x is N·L pieces of equal length, piece (n, l) for rank l of node n; it is written to
// place (l, n), so that an all-to-all within the nodes and then one between them deliver each rank its own pieces in
// order. Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training",
// sections 3.1 (quantised weights) and 3.3 (quantised gradients).
//
// Memory contract: x fp32, bf16 or fp16, read once (a group twice, from the cache); q one or half a byte an element;
// scales and minima ceil(n / group) fp32 each. Groups are multiples of 16 elements. fp32 arithmetic, each operation
// rounded by itself.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   quantise_kernel 256 threads, <= 40 registers, >= 48 warps
//   dequantise_kernel 256 threads, <= 40 registers, >= 48 warps
// Bytes an element of 16 bits: 3 to 8 bits, 2.5 to 4, and 4 a group (asymmetric: 8); groups above 256 are read twice,
// the second time from a cache where they fit there. Dequantised: 2, and 1 or 1/2 for each rank.
#pragma once

#include "../common/isa.h"

namespace zoo {

constexpr int64_t QUANT_GROUP_UNIT = 16;
constexpr int64_t QUANT_GROUP_MAX = 1 << 20;

struct Swizzle {
  int64_t nodes, local, piece;  // piece: groups in a piece

  // Where group i goes.
  ZOO_HD int64_t place(int64_t i) const {
    const int64_t which = i / piece, n = which / local, l = which % local;
    return (l * nodes + n) * piece + i % piece;
  }
};

// minima: null for symmetric quantisation. On CUDA q begins at a multiple of 8 bytes.
ZOO_KERNEL(quantise, const void* x, Dtype dtype, int32_t bits, void* q, float* scales, float* minima, int64_t n,
           int64_t group, const Swizzle& swizzle)
// q, scales and minima of `ranks` quantised tensors, one after the other.
ZOO_KERNEL(dequantise, void* out, Dtype dtype, int32_t bits, const void* q, const float* scales, const float* minima,
           int64_t ranks, float factor, int64_t n, int64_t group)

inline namespace ZOO_ISA {

// Q.
ZOO_HD constexpr float code_limit(int bits, bool symmetric) { return float((1 << (symmetric ? bits - 1 : bits)) - 1); }

}  // namespace ZOO_ISA

}  // namespace zoo
