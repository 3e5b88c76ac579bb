// Matrices (rows, dim) on a grid: a thread has WIDTH columns next to each other, of some rows one after the other, so
// that what belongs to a column (a bias, a sum) stays in registers and no index is divided.
#pragma once

#include <initializer_list>

#include "blocks.cuh"
#include "device.cuh"

namespace zoo {

constexpr int64_t FEW_ROWS = 16;  // of a thread, where no sum asks for more

// Whether every row of every one of these can be taken in packs of WIDE: rows begin at multiples of 16 bytes, and a
// warp has work. Null pointers are of what is not there.
static inline bool in_packs(int64_t dim, std::initializer_list<const void*> memory) {
  uintptr_t together = 0;
  for (const void* at : memory) together |= reinterpret_cast<uintptr_t>(at);
  return together % 16 == 0 && dim % WIDE == 0 && dim >= WARP * WIDE;
}

struct Grid {
  dim3 blocks;  // x: rows, y: columns
  unsigned threads;
  bool fits;
};

static inline Grid grid_of(int64_t rows, int64_t rows_each, int64_t dim, int width) {
  const int64_t columns = dim == 0 ? 1 : ceil_div(dim, width);
  const int64_t threads = columns < THREADS ? ceil_div(columns, WARP) * WARP : THREADS;
  const int64_t x = ceil_div(rows, rows_each), y = ceil_div(columns, threads);
  return {dim3(unsigned(x), unsigned(y)), unsigned(threads), x <= MAX_ROWS && y <= MAX_COLUMNS};
}

// The first column of the thread.
template <int WIDTH>
__device__ __forceinline__ int64_t my_column() {
  return (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * WIDTH;
}

struct RowRange {
  int64_t begin, end;
};

__device__ __forceinline__ RowRange my_rows(int64_t rows, int64_t each) {
  const int64_t begin = blockIdx.x * each;
  return {begin, begin + each < rows ? begin + each : rows};
}

// fn(row, k) for AHEAD rows at a time, first `ask`, with the last row again where there are fewer: no condition keeps
// accesses from being on their way together.
template <int AHEAD, class Ask, class Fn>
__device__ __forceinline__ void each_row(const RowRange& rows, const Ask& ask, const Fn& fn) {
  for (int64_t row = rows.begin; row < rows.end; row += AHEAD) {
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) ask(row + k < rows.end ? row + k : rows.end - 1, k);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (row + k < rows.end) fn(row + k, k);
  }
}

}  // namespace zoo
