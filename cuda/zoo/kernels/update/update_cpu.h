// What the CPU version of the update offers to the binding.
#pragma once

#include "../common/isa.h"
#include "update.h"

namespace zoo {

// A contiguous part of a list of rows, for one thread.
struct Work {
  const Row* rows;
  int64_t num_rows;
  int64_t begin, end;  // elements, counted over all rows
};

ZOO_DECLARE(bool update_part(int rule, int flags, const Scalars& scalars, Formats formats, Work work))

// One part of one row, for optimizers that need norms of whole tensors.
ZOO_DECLARE(void lamb_direction(int flags, const Scalars& scalars, Formats formats, const Row& row, int64_t begin,
                                int64_t end, double norms[2]))
ZOO_DECLARE(void lamb_apply(int flags, const Scalars& scalars, Formats formats, const Row& row, int64_t begin,
                            int64_t end))

// All rows, on all threads. False if the rule has no such flags.
bool update_cpu(int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows);

// LAMB: norms[2·i] = Σp², norms[2·i + 1] = Σd² of row i, in fp64, in an order that does not depend on the threads.
void lamb_direction_cpu(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
                        double* norms);
void lamb_apply_cpu(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows);

}  // namespace zoo
