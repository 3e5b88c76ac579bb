// The update on the CPU. Compiled once for each instruction set (ZOO_ISA); the loops over floats are vectorised by the
// compiler, with contraction off, so that all of them compute the same bits.
#include "../common/parallel.h"
#include "rows.h"

namespace zoo {
namespace ZOO_ISA {
namespace {

// How far ahead memory is asked for where blocks go through buffers; 1 to 8 blocks differ by a percent. Rows that are all
// fp32 are left to the processor's own prefetching: there asking costs 4 to 10 percent.
constexpr int64_t AHEAD = 4 * BLOCK;

// The states that a rule keeps, known to the compiler.
template <int RULE, int FLAGS>
constexpr int kept() {
  return RULE == SGD ? ((FLAGS & MOMENTUM) ? 1 : 0) : RULE == ADAM ? ((FLAGS & AMSGRAD) ? 3 : 2) : 1;
}

template <int RULE, int FLAGS>
void update_block(const Scalars& scalars, float rate, float* __restrict p, const float* __restrict g,
                  float* __restrict s0, float* __restrict s1, float* __restrict s2, int64_t n) {
  constexpr int states = kept<RULE, FLAGS>();
  const Scalars c = scalars;
  for (int64_t i = 0; i < n; ++i) {
    float a = 0, b = 0, x = 0;
    if constexpr (states > 0) a = s0[i];
    if constexpr (states > 1) b = s1[i];
    if constexpr (states > 2) x = s2[i];
    p[i] = updated<RULE, FLAGS>(c, rate, p[i], g[i], a, b, x);
    if constexpr (states > 0) s0[i] = a;
    if constexpr (states > 1) s1[i] = b;
    if constexpr (states > 2) s2[i] = x;
  }
}

// Elements [begin, end) where nothing goes through a buffer: states and what is updated are fp32; gradients, and the
// parameters of rows with a master, of format D. What is written goes out in the order in which it came in, the states
// first: parameters first cost 2 to 7 percent on one large tensor.
template <int RULE, int FLAGS, Dtype D>
void update_directly(const Scalars& scalars, float rate, const Row& given, int64_t begin, int64_t end) {
  constexpr int states = kept<RULE, FLAGS>();
  const Scalars c = scalars;
  const Row row = given;  // a copy, which no store can change
  void* const source = row.master != nullptr ? row.master : row.param;
  each_vector(end - begin, [&](int64_t i, int64_t count) {
    const int64_t at = begin + i;
    const Vec g = load<D>(row.grad, at, count);
    Vec s[MAX_STATES] = {};
    for (int k = 0; k < states; ++k) s[k] = load<F32>(row.state[k], at, count);
    const Vec p = load<F32>(source, at, count), next = updated<RULE, FLAGS>(c, rate, p, g, s[0], s[1], s[2]);
    for (int k = 0; k < states; ++k) store<F32>(s[k], row.state[k], at, count);
    store<F32>(next, source, at, count);
    if constexpr (D != F32) store<D>(next, row.param, at, count);
  });
}

template <int RULE, int FLAGS>
void update_range(const Scalars& c, Formats f, const Row& row, int64_t begin, int64_t end, RowBuffers& buffers) {
  void* const source = row.master != nullptr ? row.master : row.param;
  const Dtype source_dtype = row.master != nullptr ? F32 : f.param;
  const float rate = c.rate * row.ratio;
  const bool direct = f.state == F32 && f.param == f.grad && (f.param == F32) == (row.master == nullptr);
  if (direct && f.param == F32) {
    update_directly<RULE, FLAGS, F32>(c, rate, row, begin, end);
    return;
  }
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t n = end - at < BLOCK ? end - at : BLOCK;
    if (at + AHEAD < end) ask_for_row(row, f, at + AHEAD, n);
    if (direct) {
      if (f.param == BF16) update_directly<RULE, FLAGS, BF16>(c, rate, row, at, at + n);
      else update_directly<RULE, FLAGS, F16>(c, rate, row, at, at + n);
      continue;
    }
    float* p = fp32_block(source, source_dtype, at, n, buffers.p);
    const float* g = fp32_block(const_cast<void*>(row.grad), f.grad, at, n, buffers.g);
    float* s[MAX_STATES];
    for (int k = 0; k < MAX_STATES; ++k) s[k] = fp32_block(row.state[k], f.state, at, n, buffers.s[k]);
    update_block<RULE, FLAGS>(c, rate, p, g, s[0], s[1], s[2], n);
    for (int k = 0; k < MAX_STATES; ++k) write_block(s[k], row.state[k], f.state, at, n);
    if (row.master != nullptr) narrow(p, row.param, f.param, at, n);
    else write_block(p, row.param, f.param, at, n);
  }
}

// A contiguous part of a list of rows, for one thread.
struct Work {
  const Row* rows;
  int64_t num_rows;
  int64_t begin, end;  // elements, counted over all rows
};

struct Update {
  const Scalars& scalars;
  Formats formats;
  Work work;

  template <int RULE, int FLAGS>
  void operator()() const {
    RowBuffers buffers;
    int64_t first = 0;  // of this row, counted over all rows
    for (int64_t i = 0; i < work.num_rows && first < work.end; ++i) {
      const Row& row = work.rows[i];
      const int64_t begin = work.begin > first ? work.begin - first : 0;
      const int64_t end = work.end - first < row.n ? work.end - first : row.n;
      if (begin < end) {
        // The processor's own prefetching ends with the row: ask for the beginning of the next one in time.
        const int64_t tail = end - begin > BLOCK ? end - BLOCK : begin;
        update_range<RULE, FLAGS>(scalars, formats, row, begin, tail, buffers);
        if (i + 1 < work.num_rows) ask_for_row(work.rows[i + 1], formats, 0, 2 * BLOCK);
        update_range<RULE, FLAGS>(scalars, formats, row, tail, end, buffers);
      }
      first += row.n;
    }
  }
};

}  // namespace

void update(int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows) {
  const int64_t total = total_of(rows, num_rows);
  // Equal numbers of elements, not of tensors; cut where cache lines of aligned rows begin.
  split_evenly(total, 64, total, [&](int64_t begin, int64_t end) {
    with_rule(rule, flags, Update{scalars, formats, Work{rows, num_rows, begin, end}});
  });
}

}  // namespace ZOO_ISA
}  // namespace zoo
