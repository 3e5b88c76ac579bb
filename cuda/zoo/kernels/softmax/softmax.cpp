// Softmax on the CPU. Compiled once for each instruction set.
#include "../common/blocks.h"
#include "../common/parallel.h"
#include "../common/scratch.h"
#include "../common/vectors.h"
#include "softmax.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// Row `row`. m: its mask as fp32, or null; e: K floats and LANES more. The sweep that computes e leaves memory idle: there
// the next row is asked for, and y.
template <Dtype D>
void forward_row(const Softmax& c, int64_t row, const float* m, float* e) {
  const int64_t at = row * c.keys, n = visible_keys(c, row);
  const auto v = [&](int64_t i, int64_t count) {
    const Vec scaled = c.scale * load<D>(c.x, at + i, count);
    return m == nullptr ? scaled : scaled + load<F32>(m, i, count);
  };
  constexpr float least = -__builtin_huge_valf();
  LaneVectors most, sums = {};
  for (Vec& lane : most.at) lane = spread(least);
  // A NaN need not be the maximum: its e is one, and makes the sum one.
  each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
    most.at[k] = greater_of(first_of(v(i, count), count, least), most.at[k]);
  });
  const float shift = shift_of(most.maximum());
  each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
    const Vec one = first_of(exp_of(v(i, count) - shift), count);
    store<F32>(one, e, i);
    sums.at[k] += one;
    ask_for<D>(c.x, at + c.keys + i);
    ask_for<D>(c.y, at + i);
  });
  const float inverse = inverse_of(sums.sum());
  each_vector(n, [&](int64_t i, int64_t count) { store<D>(load<F32>(e, i) * inverse, c.y, at + i, count); });
  const Vec hidden = spread(hidden_of(inverse));
  each_vector(c.keys - n, [&](int64_t i, int64_t count) { store<D>(hidden, c.y, at + n + i, count); });
}

template <Dtype D>
void backward_row(const SoftmaxBackward& c, int64_t row) {
  const int64_t n = c.keys, at = row * n;
  LaneVectors sums = {};
  each_lane_vector(n, [&](int64_t i, int k, int64_t count) {
    sums.at[k] += load<D>(c.grad_y, at + i, count) * load<D>(c.y, at + i, count);
    ask_for<D>(c.grad_x, at + i);
  });
  const Vec scale = spread(c.scale), dot = spread(sums.sum());
  each_vector(n, [&](int64_t i, int64_t count) {
    const Vec y = load<D>(c.y, at + i, count), dy = load<D>(c.grad_y, at + i, count);
    store<D>(softmax_grad(scale, y, dy, dot), c.grad_x, at + i, count);
    ask_for<D>(c.grad_y, at + n + i);
    ask_for<D>(c.y, at + n + i);
  });
}

}  // namespace

void softmax(const Softmax& c) {
  split_evenly(c.rows, 1, c.rows * c.keys, [&](int64_t begin, int64_t end) {
    const Scratch<float> scratch(2 * c.keys + LANES);
    float* const wide = scratch.data() + c.keys + LANES;
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t offset = c.mask == nullptr ? 0 : mask_offset(c, row);
        const float* m = fp32_block(c.mask, c.mask_dtype, offset, visible_keys(c, row), wide);
        forward_row<decltype(of)::value>(c, row, m, scratch.data());
      }
    });
  });
}

void softmax_backward(const SoftmaxBackward& c) {
  split_evenly(c.rows, 1, c.rows * c.keys, [&](int64_t begin, int64_t end) {
    with_dtype(c.dtype, [&](auto of) {
      for (int64_t row = begin; row < end; ++row) backward_row<decltype(of)::value>(c, row);
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
