// Root mean square normalisation on the CPU. Compiled once for each instruction set.
#include "rms_norm.h"

#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vectors.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <Dtype D, bool SUM>
void rows(const RmsNorm& c, const float* w, int64_t begin, int64_t end) {
  const int64_t n = c.dim;
  const void* const total = SUM ? c.sum : c.x;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * n;
    LaneVectors squares = {};
    each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
      Vec s = load<D>(c.x, first + i, count);
      if constexpr (SUM) s = store<D>(s + load<D>(c.residual, first + i, count), c.sum, first + i, count);
      squares.at[k] += s * s;
    });
    const Vec root = spread(rstd_of(squares.sum() * c.inverse_dim, c.eps));
    each_vector(n, [&](int64_t i, int64_t count) {
      ask_for<D>(c.x, first + n + i);
      store<D>((load<D>(total, first + i, count) * root) * load<F32>(w, i, count), c.y, first + i, count);
    });
  }
}

}  // namespace

void rms_norm(const RmsNorm& c) {
  const int64_t n = c.dim;
  split_evenly(c.rows, 1, c.rows * n, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(n);
    const float* w = fp32_block(c.weight, c.weight_dtype, 0, n, scratch.data());
    if (c.plus_one) {
      for (int64_t i = 0; i < n; ++i) scratch.data()[i] = 1.0f + w[i];
      w = scratch.data();
    }
    with_dtype(c.dtype, [&](auto of) {
      constexpr Dtype D = decltype(of)::value;
      if (c.residual != nullptr) rows<D, true>(c, w, begin, end);
      else rows<D, false>(c, w, begin, end);
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
