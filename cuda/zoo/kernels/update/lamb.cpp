// LAMB on the CPU: the two passes over one part of one row. Compiled once for each instruction set.
//
// Pass 1 updates m and v and sums p² and d²; pass 2 computes d again from m, v and p, so that no buffer of the size of
// the tensor is needed. Both passes see the same fp32 states, so they see the same d.
#include <type_traits>

#include "../common/parallel.h"
#include "../common/squares.h"
#include "rows.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

template <int FLAGS>
void direction_block(const Scalars& scalars, const float* __restrict p, const float* __restrict g,
                     float* __restrict s0, float* __restrict s1, float* __restrict d, int64_t n) {
  const Scalars c = scalars;
  for (int64_t i = 0; i < n; ++i) {
    float m = s0[i], v = s1[i];
    advance_moments(c, c.grad_scale * g[i], m, v);
    d[i] = moment_direction<LAMB, FLAGS>(c, p[i], m, v);
    s0[i] = m;
    s1[i] = v;
  }
}

template <int FLAGS>
void apply_block(const Scalars& scalars, float rate, float* __restrict p, const float* __restrict s0,
                 const float* __restrict s1, int64_t n) {
  const Scalars c = scalars;
  for (int64_t i = 0; i < n; ++i) p[i] = c.decay * p[i] - rate * moment_direction<LAMB, FLAGS>(c, p[i], s0[i], s1[i]);
}

struct Source {
  void* memory;
  Dtype dtype;
};

inline Source source_of(const Row& row, Formats f) {
  if (row.master != nullptr) return {row.master, F32};
  return {row.param, f.param};
}

template <int FLAGS>
void direction_part(const Scalars& c, Formats f, const Row& row, int64_t begin, int64_t end, double* norms) {
  RowBuffers buffers;
  alignas(64) double lanes[2][SHORT_LANES] = {};
  const Source source = source_of(row, f);
  float *m = static_cast<float*>(row.state[0]), *v = static_cast<float*>(row.state[1]);
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    const float* p = fp32_block(source.memory, source.dtype, at, n, buffers.p);
    const float* g = fp32_block(row.grad, f.grad, at, n, buffers.g);
    direction_block<FLAGS>(c, p, g, m + at, v + at, buffers.s[0], n);
    add_squares(p, n, lanes[0]);
    add_squares(buffers.s[0], n, lanes[1]);
  }
  for (int which = 0; which < 2; ++which) norms[which] = sum_of(lanes[which]);
}

template <int FLAGS>
void apply_part(const Scalars& c, Formats f, const Row& row, float ratio, int64_t begin, int64_t end) {
  RowBuffers buffers;
  const Source source = source_of(row, f);
  const float *m = static_cast<float*>(row.state[0]), *v = static_cast<float*>(row.state[1]);
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    float* p = fp32_block(source.memory, source.dtype, at, n, buffers.p);
    apply_block<FLAGS>(c, c.rate * ratio, p, m + at, v + at, n);
    if (row.master != nullptr) narrow(p, row.param, f.param, at, n);
    else write_block(p, row.param, f.param, at, n);
  }
}

// fn(FLAGS) as a constant.
template <class Fn>
void with_flags(int flags, const Fn& fn) {
  if (flags == (COUPLED | EPS_INSIDE)) fn(std::integral_constant<int, COUPLED | EPS_INSIDE>());
  else if (flags == EPS_INSIDE) fn(std::integral_constant<int, EPS_INSIDE>());
  else if (flags == COUPLED) fn(std::integral_constant<int, COUPLED>());
  else fn(std::integral_constant<int, 0>());
}

}  // namespace

void lamb_direction(int flags, const Scalars& c, Formats f, const Row* rows, int64_t num_rows, double* parts,
                    double* norms) {
  const int64_t count = square_parts(rows, num_rows);
  with_flags(flags, [&](auto known) {
    split_evenly(count, 1, total_of(rows, num_rows), [&](int64_t first, int64_t last) {
      each_square_part(rows, num_rows, first, last, [&](int64_t row, int64_t begin, int64_t end, int64_t part) {
        direction_part<decltype(known)::value>(c, f, rows[row], begin, end, parts + 2 * part);
      });
    });
  });
  for (int64_t i = 0; i < 2 * num_rows; ++i) norms[i] = 0;
  each_square_part(rows, num_rows, 0, count, [&](int64_t row, int64_t, int64_t, int64_t part) {
    for (int k = 0; k < 2; ++k) norms[2 * row + k] += parts[2 * part + k];
  });
}

void lamb_apply(int flags, const Scalars& c, Formats f, const Row* rows, int64_t num_rows, const float* ratios) {
  with_flags(flags, [&](auto known) {
    split_evenly(square_parts(rows, num_rows), 1, total_of(rows, num_rows), [&](int64_t first, int64_t last) {
      each_square_part(rows, num_rows, first, last, [&](int64_t row, int64_t begin, int64_t end, int64_t) {
        apply_part<decltype(known)::value>(c, f, rows[row], ratios[row], begin, end);
      });
    });
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
