// Launches over many tensors: up to a few hundred rows by value in the arguments of a kernel, so that no table has to
// be copied to the device first and nothing has to be kept alive after the call. A launch copies its arguments as long
// as their type is: a list of a few rows, such as one flat shard, has a type of its own with room for FEW.
//
// Rows are cut into parts of equal length, a block a part. The parts of a launch are numbered through its rows; a block
// finds its row by bisection in `first`, which is in constant memory and the same for all threads.
#pragma once

#include "device.cuh"

namespace zoo {

// Arguments of a kernel may be 4 KB, and 32 KB where both compiler and driver are at least of CUDA 12.1: every driver
// that runs CUDA 13 is.
#if CUDART_VERSION >= 13000
constexpr size_t ARGUMENTS = 32764;
#else
constexpr size_t ARGUMENTS = 4096;
#endif
constexpr size_t OTHER_ARGUMENTS = 160;

constexpr int FEW = 8;

template <class Row>
constexpr int MANY = int((ARGUMENTS - OTHER_ARGUMENTS) / (sizeof(Row) + sizeof(int32_t))) - 2;

template <class Row, int CAPACITY>
struct Batch {
  Row rows[CAPACITY];
  int32_t first[CAPACITY + 1];  // of each row the number of its first part; first[count]: how many parts there are
  int32_t count;

  // The row of a part: the last one that does not begin after it (rows without elements have no part).
  ZOO_HD int row_of(int part) const {
    int low = 0, high = count;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= part) low = middle;
      else high = middle;
    }
    return low;
  }
};

// Elements of a row: those of part number `part` of the batch.
struct Part {
  int row;
  int64_t begin, end;
};

template <class Row, int CAPACITY>
ZOO_HD Part part_of(const Batch<Row, CAPACITY>& batch, int part, int64_t length) {
  const int row = batch.row_of(part);
  const int64_t begin = (part - batch.first[row]) * length, n = batch.rows[row].n;
  return {row, begin, begin + length < n ? begin + length : n};
}

template <int CAPACITY, class Row, class Fn>
static inline int32_t each_batch_of(const Row* rows, int64_t num_rows, int64_t part, const Fn& launch) {
  static_assert(sizeof(Batch<Row, CAPACITY>) + OTHER_ARGUMENTS <= ARGUMENTS, "too large for the arguments of a kernel");
  Batch<Row, CAPACITY> batch;
  int64_t parts = 0;
  for (int64_t i = 0; i < num_rows;) {
    const int64_t first_row = i;
    batch.count = batch.first[0] = 0;
    for (; i < num_rows && batch.count < CAPACITY; ++i, ++batch.count) {
      batch.rows[batch.count] = rows[i];
      batch.first[batch.count + 1] = batch.first[batch.count] + int32_t(ceil_div(rows[i].n, part));
    }
    launch(batch, first_row, parts);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return int32_t(error);
    parts += batch.first[batch.count];
  }
  return cudaSuccess;
}

// Calls launch(batch, first_row, first_part) until all rows had their turn; first_row and first_part count over all of
// them. Returns the error of the first launch that failed.
template <class Row, class Fn>
static inline int32_t each_batch(const Row* rows, int64_t num_rows, int64_t part, const Fn& launch) {
  if (num_rows <= FEW) return each_batch_of<FEW>(rows, num_rows, part, launch);
  return each_batch_of<MANY<Row>>(rows, num_rows, part, launch);
}

}  // namespace zoo
