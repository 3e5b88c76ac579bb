// Quantisation on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/lanes.h"
#include "../common/parallel.h"
#include "quantise.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// max |x|; NaN if there is one. The order does not matter, so lanes change nothing.
void largest(const float* __restrict x, float* __restrict lanes, int64_t n) {
  int64_t i = 0;
  for (; i + SHORT_LANES <= n; i += SHORT_LANES)
    for (int k = 0; k < SHORT_LANES; ++k) {
      const float a = __builtin_fabsf(x[i + k]);
      lanes[k] = ((a > lanes[k]) | (a != a)) ? a : lanes[k];
    }
  for (; i < n; ++i) {
    const float a = __builtin_fabsf(x[i]);
    lanes[0] = ((a > lanes[0]) | (a != a)) ? a : lanes[0];
  }
}

void rounded(const float* __restrict x, int32_t* __restrict q, float inverse, float limit, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float t = inverse * x[i];
    t = t != t ? 0.0f : t;
    t = t > limit ? limit : t;
    t = t < -limit ? -limit : t;
    // Adding 1.5·2^23 leaves no room for a fraction: the addition rounds to nearest, ties to even.
    q[i] = int32_t((t + 12582912.0f) - 12582912.0f);
  }
}

void pack(const int32_t* __restrict q, int8_t* __restrict out, int bits, int64_t n) {
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) out[i] = int8_t(q[i]);
    return;
  }
  int64_t i = 0;
  for (; i + 2 <= n; i += 2) out[i / 2] = int8_t((q[i] & 15) | ((q[i + 1] & 15) << 4));
  if (i < n) out[i / 2] = int8_t(q[i] & 15);
}

// acc <- first ? s·q : acc + s·q
void add_scaled(float* __restrict acc, const int8_t* __restrict q, int bits, float scale, bool first, int64_t n) {
  alignas(64) float y[BLOCK];
  if (bits == 8) {
    for (int64_t i = 0; i < n; ++i) y[i] = scale * float(q[i]);
  } else {
    for (int64_t j = 0; j < (n + 1) / 2; ++j) {
      const int32_t byte = q[j];
      y[2 * j] = scale * float(int32_t(uint32_t(byte) << 28) >> 28);  // the lower four bits, with their sign
      y[2 * j + 1] = scale * float(byte >> 4);
    }
  }
  for (int64_t i = 0; i < n; ++i) acc[i] = first ? y[i] : acc[i] + y[i];
}

// n elements of x from `offset` on become one group at q; returns its scale.
float quantise_group(const void* x, Dtype dtype, int bits, int8_t* q, int64_t offset, int64_t n) {
  alignas(64) float buffer[BLOCK], lanes[SHORT_LANES] = {};
  alignas(64) int32_t whole[BLOCK];
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t count = n - at < BLOCK ? n - at : BLOCK;
    largest(fp32_block(x, dtype, offset + at, count, buffer), lanes, count);
  }
  float most = lanes[0];
  for (int k = 1; k < SHORT_LANES; ++k) most = ((lanes[k] > most) | (lanes[k] != lanes[k])) ? lanes[k] : most;
  const float limit = bits == 8 ? 127.0f : 7.0f, inverse = limit / most;
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t count = n - at < BLOCK ? n - at : BLOCK;
    rounded(fp32_block(x, dtype, offset + at, count, buffer), whole, inverse, limit, count);
    pack(whole, q + at * bits / 8, bits, count);
  }
  return most / limit;
}

// Elements [offset, offset + n), all of one group, summed over `ranks` quantised tensors of `stride` bytes each.
void dequantise_group(void* out, Dtype dtype, int bits, const int8_t* q, int64_t stride, const float* scales,
                      int64_t scale_stride, int64_t ranks, float factor, int64_t offset, int64_t n) {
  alignas(64) float acc[BLOCK];
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t count = n - at < BLOCK ? n - at : BLOCK, from = (offset + at) * bits / 8;
    for (int64_t r = 0; r < ranks; ++r)
      add_scaled(acc, q + r * stride + from, bits, scales[r * scale_stride], r == 0, count);
    if (factor != 1.0f)
      for (int64_t i = 0; i < count; ++i) acc[i] = factor * acc[i];
    narrow(acc, out, dtype, offset + at, count);
  }
}

}  // namespace

void quantise(const void* x, Dtype dtype, int32_t bits, int8_t* q, float* scales, int64_t n, int64_t group,
              const Swizzle& swizzle) {
  split_evenly(ceil_div(n, group), 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group, to = swizzle.place(i);
      scales[to] = quantise_group(x, dtype, bits, q + to * group * bits / 8, i * group, count);
    }
  });
}

void dequantise(void* out, Dtype dtype, int32_t bits, const int8_t* q, const float* scales, int64_t ranks, float factor,
                int64_t n, int64_t group) {
  const int64_t groups = ceil_div(n, group), stride = ceil_div(n * bits, 8);
  split_evenly(groups, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t count = (i + 1) * group < n ? group : n - i * group;
      dequantise_group(out, dtype, bits, q, stride, scales + i, groups, ranks, factor, i * group, count);
    }
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
