// Gating of a mixture of experts: the choice of k experts a token, places within them, and the way there and back.
//
// Choice (Shazeer et al. 2017, section 2.1; Fedus et al. 2022, section 2.1), of logits v (T, E):
//
//   i_0, ..., i_{k-1} = the experts of the k greatest v, in falling order; of equals the lower index first
//   M = max v     e = exp(v - M)     S = Σ_e e, or Σ_j e_{i_j} if renormalised     w_j = e_{i_j}·(1/S)
//   dv = p·(g - Σ_j dw_j·w_j)     p = e·(1/S), with e = 0 at experts not chosen if renormalised
//                                 g = Σ_j dw_j over the j with this expert, 0 without one
//
// A NaN is greater than everything, as in torch.topk, so the indices are always those of k experts. A NaN or +∞ makes
// all w (and dv) of its token NaN; where all v are -∞, all w are 0; an expert at -∞ that had to be chosen has w = 0.
//
// Places (Lepikhin et al. 2021, algorithm 1): assignment (t, j) to expert e gets the number of assignments to e before
// it, in the order of (j, t), all first choices before all second ones, or of (t, j). From the capacity C on it is -1:
// dropped.
//
//   demand_e = assignments to e     count_e = min(demand_e, C)
//
// With a key q (T, k) an expert of demand above C keeps the C assignments of the greatest q, of equal ones those that
// come first, and these have the places 0, ..., C - 1, in the order as before. A NaN is the greatest, both zeros are
// equal. No sort: θ = the C-th greatest q of the expert; above θ all are kept, of those equal to θ the first C - #{q >
// θ}.
//
// There and back (Gale et al. 2023, section 5.2), with r(t, j) the row of an assignment, or -1, no row twice:
//
//   permute:    y_{r(t, j)} = x_t, rows without an assignment 0          dx = unpermute of dy, without weights
//   unpermute:  o_t = Σ_j w_{tj}·y_{r(t, j)}, from 0, in the order of j, over r >= 0
//               dy_{r(t, j)} = w_{tj}·do_t, other rows 0      dw_{tj} = Σ_d do_t·y_{r(t, j)}, 0 where dropped
//
// permute copies bits. All arithmetic is fp32, every operation rounded by itself as written; exp is that of
// common/elementary.h, Σ_e and Σ_d are lane sums (common/lanes.h), Σ_j starts from 0 in the order of j. Integers are
// counted per part and then scanned, so no result depends on threads.
//
// Memory contract. Everything contiguous: v, dv (T, E); i, w, dw, places, rows (T, k); demand, count (E,); x, o (T, D);
// y (R, D). Indices, places, rows and counts: int64. w of the gate: fp32; w of unpermute, v, and x with y: any format
// each; q (T, k), any format. 1 <= k <= E. Each operation reads its inputs once (the choice on CUDA reads v k + 2
// times, places are counted and then written, a key on CUDA is read up to 5 times) and writes its results once.
// `source` is the inverse of r: t·k + j, or -1, for each of R rows.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   gate_kernel 128 threads, <= 48 registers, >= 40 warps
//   gate_backward_kernel 128 threads, <= 42 registers, >= 40 warps
//   places_kernel 256 threads, <= 26 registers, >= 64 warps
//   scan_kernel 128 threads, <= 29 registers, >= 64 warps
//   first_kernel 32 threads, <= 30 registers, >= 32 warps
//   group_kernel 256 threads, <= 12 registers, >= 64 warps
//   keep_kernel 256 threads, <= 34 registers, >= 48 warps
//   invert_kernel 256 threads, <= 10 registers, >= 64 warps
//   permute_kernel 256 threads, <= 40 registers, >= 48 warps
//   unpermute_kernel 256 threads, <= 53 registers, >= 32 warps
//   unpermute_backward_kernel 256 threads, <= 54 registers, >= 32 warps
// Bytes an element of D of 16 bits, for k rows that a token has: permute 2 + 2k; unpermute 2k + 2; its backward 6k, the
// token's part of it from a cache. Places: 16 an assignment, 8 read again, and 24 for each expert of 256 assignments.
#pragma once

#include "../softmax/softmax.h"

namespace zoo {

struct Gate {
  const void* logits;
  int64_t* indices;
  float* probabilities;
  int64_t tokens, experts, choices;
  bool renormalise;
  Dtype dtype;
};

struct GateBackward {
  const float* grad_probabilities;
  const void* logits;
  const int64_t* indices;
  void* grad_logits;
  int64_t tokens, experts, choices;
  bool renormalise;
  Dtype dtype;
};

struct Places {
  const int64_t* indices;
  int64_t *positions, *counts, *demand;
  int64_t tokens, choices, experts, capacity;  // capacity: negative where there is none
  bool choices_first;
  const void* key;  // null where the order decides who is dropped
  Dtype key_dtype;
};

struct Permute {
  const void* x;
  void* y;
  const int64_t* source;
  int64_t choices, rows, row_bytes;
  const int64_t* row_of;  // of each assignment: r; read on CPUs
  int64_t tokens;
};

struct Unpermute {
  const void *y, *weights;  // weights: null where all are 1
  const int64_t* rows;
  void* out;
  int64_t tokens, choices, num_rows, dim;  // num_rows: R
  Dtype dtype, weight_dtype;
};

struct UnpermuteBackward {
  const void *grad_out, *y, *weights;
  const int64_t* source;
  void *grad_y, *grad_weights;
  int64_t tokens, choices, rows, dim;
  Dtype dtype, weight_dtype;
};

// What the binding refuses on CPUs by the values of indices and rows does no harm on CUDA, where it would have to wait
// for the GPU, and shows: no address outside of the tensors is touched, and a token with an index of no expert gets a
// gradient of NaN; such an assignment gets the place -1 and is not in the demand. A row out of range is left out of
// `source`, so nothing goes there; unpermute makes its token NaN. Of several assignments with one row the first stays
// in `source`.
ZOO_KERNEL(top_k_gate, const Gate& c)
ZOO_KERNEL(top_k_gate_backward, const GateBackward& c)

constexpr int64_t PLACES_PART = 256;  // assignments that a block counts

ZOO_CPU_KERNEL(positions_in_expert, const Places& c)
// `taken`: E numbers for each PLACES_PART assignments begun. `order`: E + T·k numbers, read and written only where
// there are a key and a capacity.
ZOO_CUDA_KERNEL(positions_in_expert, const Places& c, int64_t* taken, int64_t* order)

// source (R,), which permute and the backward of unpermute read, from rows (n = T·k,). On CPUs the binding makes it.
ZOO_CUDA_KERNEL(invert_rows, const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source)

// On CUDA the rows of `y` and the tokens are at most 2^31 - 1.
ZOO_KERNEL(permute, const Permute& c)
ZOO_KERNEL(unpermute, const Unpermute& c)
ZOO_KERNEL(unpermute_backward, const UnpermuteBackward& c)

inline namespace ZOO_ISA {

// Whether a stands before b in the order of the choice; neither does if they are equal or both NaN.
ZOO_HD bool before(float a, float b) { return (a > b) | ((a != a) & (b == b)); }

ZOO_HD float gate_grad(float p, float g, float dot) { return p * (g - dot); }

// The place of an assignment that finds `taken` before it.
ZOO_HD int64_t place_of(int64_t taken, int64_t capacity) { return capacity < 0 || taken < capacity ? taken : -1; }

ZOO_HD int64_t count_of(int64_t demand, int64_t capacity) {
  return capacity < 0 || demand < capacity ? demand : capacity;
}

// The capacity that the order alone enforces; with a key all have places before some are dropped.
ZOO_HD int64_t capacity_in_order(const Places& c) { return c.key == nullptr ? c.capacity : -1; }

// The key of an assignment as a number that grows with it. In integers, since a processor may take subnormals for
// zeros.
ZOO_HD uint32_t key_of(const Places& c, int64_t at) {
  uint32_t bits;
  if (c.key_dtype == F32) {
    bits = bits_of_float(static_cast<const float*>(c.key)[at]);
  } else {
    // bf16 becomes fp32; moved up, fp16 has another exponent but the same order, and its NaNs are no NaNs yet.
    bits = uint32_t(static_cast<const uint16_t*>(c.key)[at]) << 16;
    if (c.key_dtype == F16 && (bits & 0x7FFFFFFFu) > 0x7C000000u) bits = 0x7FFFFFFFu;
  }
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0xFFFFFFFFu;  // NaN
  return magnitude == bits ? 0x80000000u + magnitude : 0x80000000u - magnitude;
}

// Where assignment number s in the order of priority stands in the memory of (T, k).
ZOO_HD int64_t assignment(const Places& c, int64_t s) {
  return c.choices_first ? s % c.tokens * c.choices + s / c.tokens : s;
}

}  // namespace ZOO_ISA
}  // namespace zoo
