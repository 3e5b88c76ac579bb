// LAMB on the CPU: the two passes over one part of one row. Compiled once for each instruction set.
//
// Pass 1 updates m and v and sums p² and d²; pass 2 computes d again from m, v and p, so that no buffer of the size of
// the tensor is needed. Both passes see the same fp32 states, so they see the same d.
#include "../common/squares.h"
#include "rows_isa.h"
#include "update_cpu.h"

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
  alignas(64) double lanes[2][LANES] = {};
  const Source source = source_of(row, f);
  float *m = static_cast<float*>(row.state[0]), *v = static_cast<float*>(row.state[1]);
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    const float* p = fp32_block(source.memory, source.dtype, at, n, buffers.p);
    const float* g = fp32_block(const_cast<void*>(row.grad), f.grad, at, n, buffers.g);
    direction_block<FLAGS>(c, p, g, m + at, v + at, buffers.s[0], n);
    add_squares(p, n, lanes[0]);
    add_squares(buffers.s[0], n, lanes[1]);
  }
  for (int which = 0; which < 2; ++which) norms[which] = sum_of(lanes[which]);
}

template <int FLAGS>
void apply_part(const Scalars& c, Formats f, const Row& row, int64_t begin, int64_t end) {
  RowBuffers buffers;
  const Source source = source_of(row, f);
  const float *m = static_cast<float*>(row.state[0]), *v = static_cast<float*>(row.state[1]);
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    float* p = fp32_block(source.memory, source.dtype, at, n, buffers.p);
    apply_block<FLAGS>(c, c.rate * row.ratio, p, m + at, v + at, n);
    if (row.master != nullptr) narrow(p, row.param, f.param, at, n);
    else write_block(p, row.param, f.param, at, n);
  }
}

}  // namespace

void lamb_direction(int flags, const Scalars& c, Formats f, const Row& row, int64_t begin, int64_t end,
                    double norms[2]) {
  if (flags == (COUPLED | EPS_INSIDE)) direction_part<COUPLED | EPS_INSIDE>(c, f, row, begin, end, norms);
  else if (flags == EPS_INSIDE) direction_part<EPS_INSIDE>(c, f, row, begin, end, norms);
  else if (flags == COUPLED) direction_part<COUPLED>(c, f, row, begin, end, norms);
  else direction_part<0>(c, f, row, begin, end, norms);
}

void lamb_apply(int flags, const Scalars& c, Formats f, const Row& row, int64_t begin, int64_t end) {
  if (flags == (COUPLED | EPS_INSIDE)) apply_part<COUPLED | EPS_INSIDE>(c, f, row, begin, end);
  else if (flags == EPS_INSIDE) apply_part<EPS_INSIDE>(c, f, row, begin, end);
  else if (flags == COUPLED) apply_part<COUPLED>(c, f, row, begin, end);
  else apply_part<0>(c, f, row, begin, end);
}

}  // namespace ZOO_ISA
}  // namespace zoo
