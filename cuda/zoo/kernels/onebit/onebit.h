// 1-bit compression with error feedback.
//
//   c_i  = x_i + e_i                      what is to be sent, with what earlier steps still owe
//   s_G  = (1/|G|) Σ_{i in G} |c_i|       one fp32 scale for each group G of consecutive elements
//   b_i  = 1 if c_i >= 0 else 0           bit i mod 8 of byte i / 8
//   y_i  = s_G if b_i else -s_G           what the receiver makes of it
//   e_i' = c_i - y_i                      so y_i + e_i' = c_i, up to the rounding of this subtraction
//
// The first three are one kernel. The last one is another, because between them lies the decision whether the step
// counts; or it is a part of the next compression, which takes the c and the bits of the last one for e:
//
//   c_i  = x_i + (c_i of before - y_i of before)
//
// A server's x is the mean of what D ranks sent, x_i = f · Σ_r y_{r,i}, r = 0, 1, … in order, f = 1/D.
//
// Among all ±s, the mean of the magnitudes is the s that makes Σ e'² smallest. Seide et al. 2014, "1-Bit Stochastic
// Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD"; Tang et al. 2021, "1-bit Adam",
// section 4. Wire: the scales, then the bits: 1/8 byte an element and 4 bytes a group, 1/31.5 of fp32 with groups of
// 2,048.
//
// fp32, each operation rounded by itself. Σ|c| goes into 16 lanes, element i of the group into lane i mod 16, which are
// added in order: the same bits on every instruction set. A NaN or infinity makes its group's scale NaN or infinite.
//
// Memory contract. compress: x (fp32, bf16 or fp16) or the wires (ranks rows of stride bytes, a multiple of 4) and e
// (fp32, or null) are read; c (fp32, or null where it is x itself) is written and may be x or e; sent_bits and
// sent_scales (or null) stand for e, which is c of before; bits: ceil(n / 8) bytes, unused bits of the last one 0;
// scales: ceil(n / group) fp32. owed: c, bits and scales are read, e is written and may be c. Group sizes are multiples
// of 64, so groups begin at whole bytes.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   compress_kernel 128 threads, <= 40 registers, >= 48 warps
//   owed_kernel 256 threads, <= 27 registers, >= 64 warps
//   decompress_kernel 256 threads, <= 27 registers, >= 64 warps
// Bytes an element of fp32: compress 4 and 1/8, with an e 12 and 1/8, with c and bits of before 12 and 1/4, of wires 4
// less and D/8 more; owed 8 and 1/8; back 4 and 1/8, added 8 and 1/8.
#pragma once

#include "../common/isa.h"

namespace zoo {

constexpr int64_t ONEBIT_GROUP_UNIT = 64;
constexpr int64_t ONEBIT_GROUP_MAX = 1 << 20;

ZOO_KERNEL(onebit_compress, float* c, const void* x, Dtype dtype, const float* error, const uint8_t* sent_bits,
           const float* sent_scales, uint8_t* bits, float* scales, int64_t n, int64_t group)
ZOO_KERNEL(onebit_compress_mean, float* c, const uint8_t* wires, int64_t stride, int64_t ranks, float factor,
           const float* error, const uint8_t* sent_bits, const float* sent_scales, uint8_t* bits, float* scales,
           int64_t n, int64_t group)
ZOO_KERNEL(onebit_owed, float* error, const float* c, const uint8_t* bits, const float* scales, int64_t n,
           int64_t group)
ZOO_KERNEL(onebit_decompress, void* out, Dtype dtype, const uint8_t* bits, const float* scales, bool add, int64_t n,
           int64_t group)

}  // namespace zoo
