// What the files of the update on CPUs share.
#pragma once

#include "../common/blocks.h"
#include "update.h"

namespace zoo {
inline namespace ZOO_ISA {

struct RowBuffers {
  alignas(64) float p[BLOCK], g[BLOCK], s[MAX_STATES][BLOCK];
};

static inline int64_t total_of(const Row* rows, int64_t num_rows) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_rows; ++i) total += rows[i].n;
  return total;
}

static inline void ask_for(const void* memory, int64_t begin, int64_t end) {
  if (memory == nullptr) return;
  for (int64_t i = begin; i < end; i += 64) __builtin_prefetch(static_cast<const char*>(memory) + i, 1);
}

// Software prefetch of elements [at, at + n) of a row, or as many as there are.
static inline void ask_for_row(const Row& row, Formats formats, int64_t at, int64_t n) {
  const int64_t end = at + n < row.n ? at + n : row.n;
  const int64_t param = size_of(formats.param), grad = size_of(formats.grad), state = size_of(formats.state);
  ask_for(row.grad, at * grad, end * grad);
  ask_for(row.param, at * param, end * param);
  ask_for(row.master, at * 4, end * 4);
  for (void* s : row.state) ask_for(s, at * state, end * state);
}

}  // namespace ZOO_ISA
}  // namespace zoo
