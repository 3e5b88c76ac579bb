// Softmax over the keys of attention: y = softmax(c·x + m) over the last dim, masked.
//
//   v = c·x + m, and -∞ at keys k > q + (K - Q) if causal      (the last query sees all keys, as with a cache)
//   M = max v     e = exp(v - M)     S = Σ e     y = e·(1/S)   (Vaswani et al. 2017, section 3.2.1; M against overflow)
//   dx = c·(y·(dy - Σ dy·y))
//
// A row in which everything is masked (M = -∞) gives zeros, where torch gives NaN. A NaN or +∞ among the v that a row
// sees makes all of the row NaN, as in torch: hidden keys too, for whom 0·(1/S) is NaN then. What stands at a key that
// causality hides, in x or in m, has no effect. All arithmetic is fp32, every operation rounded by itself as written;
// exp is that of common/elementary.h, sums are lane sums over all K (common/lanes.h). The backward starts from the y
// that was returned, rounded to its format; it looks at every key, so a NaN in dy makes its row NaN.
//
// Memory contract. x, y, dx, dy: (T, K), contiguous, of one format, T = (...)·Q. m: any format; its rows are
// contiguous, row t begins at the sum of index·stride over the dims that T is made of (stride 0: broadcast). Forward
// reads x (and m), writes y; backward reads y and dy, writes dx: once each. Keys that causality hides are not read by
// the forward.
//
// On CUDA, held against nvcc by make kernels-check (warps: of 64, that a multiprocessor has at a time):
//   softmax_kernel 256 threads, <= 54 registers, >= 32 warps
//   softmax_backward_kernel 256 threads, <= 40 registers, >= 48 warps
// Rows of up to 1,024 keys have 64 threads. A row is in shared memory, 4 bytes a key (backward: 8), up to 44 KiB;
// longer ones come in pieces, and again for each sweep. Bytes a key of 16 bits: forward 4, and those of the mask;
// backward 6.
#pragma once

#include "../common/elementary.h"
#include "../common/isa.h"
#include "../common/lanes.h"

namespace zoo {

constexpr int MAX_ROW_DIMS = 7;

struct Softmax {
  const void *x, *mask;  // mask: null where there is none
  void* y;
  int64_t rows, queries, keys;
  int64_t sizes[MAX_ROW_DIMS], mask_strides[MAX_ROW_DIMS];  // of the dims of T; the last is Q
  int32_t row_dims;
  float scale;
  bool causal;
  Dtype dtype, mask_dtype;
};

struct SoftmaxBackward {
  const void *grad_y, *y;
  void* grad_x;
  int64_t rows, keys;
  float scale;
  Dtype dtype;
};

// On CUDA T is at most 2^31 - 1.
ZOO_KERNEL(softmax, const Softmax& c)
ZOO_KERNEL(softmax_backward, const SoftmaxBackward& c)

inline namespace ZOO_ISA {

// The number of keys that a row may see, 0 to K.
ZOO_HD int64_t visible_keys(const Softmax& c, int64_t row) {
  if (!c.causal) return c.keys;
  const int64_t last = row % c.queries + (c.keys - c.queries) + 1;
  return last < 0 ? 0 : last < c.keys ? last : c.keys;
}

// Elements from the beginning of the mask to its row for row t.
ZOO_HD int64_t mask_offset(const Softmax& c, int64_t row) {
  int64_t offset = 0;
  for (int k = c.row_dims - 1; k >= 0; --k) {
    offset += row % c.sizes[k] * c.mask_strides[k];
    row /= c.sizes[k];
  }
  return offset;
}

// What is subtracted: M, or 0 for a row without anything to see.
ZOO_HD float shift_of(float maximum) { return maximum == -__builtin_huge_valf() ? 0.0f : maximum; }

ZOO_HD float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// y at keys that causality hides: e = 0.
ZOO_HD float hidden_of(float inverse) { return 0.0f * inverse; }

// T: float, or a vector of it.
template <class T>
ZOO_HD T softmax_grad(T scale, T y, T dy, T dot) {
  return scale * (y * (dy - dot));
}

}  // namespace ZOO_ISA
}  // namespace zoo
