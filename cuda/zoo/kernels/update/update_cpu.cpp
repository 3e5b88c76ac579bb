#include "update_cpu.h"

#include <vector>

#include "../common/parallel.h"

namespace zoo {
namespace {

struct Nothing {
  template <int RULE, int FLAGS>
  void operator()() const {}
};

int64_t total_of(const Row* rows, int64_t num_rows) {
  int64_t total = 0;
  for (int64_t i = 0; i < num_rows; ++i) total += rows[i].n;
  return total;
}

// Parts of rows, each short enough to share out and long enough to be worth it.
struct Part {
  int64_t row, begin, end;
};

std::vector<Part> parts_of(const Row* rows, int64_t num_rows) {
  std::vector<Part> parts;
  for (int64_t i = 0; i < num_rows; ++i)
    for (int64_t at = 0; at < rows[i].n; at += LAMB_PART)
      parts.push_back({i, at, at + LAMB_PART < rows[i].n ? at + LAMB_PART : rows[i].n});
  return parts;
}

}  // namespace

bool update_cpu(int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows) {
  if (!with_rule(rule, flags, Nothing{})) return false;
  const int64_t total = total_of(rows, num_rows);
  // Equal numbers of elements, not of tensors; cut where cache lines of aligned rows begin.
  split_evenly(total, 64, total, [&](int64_t begin, int64_t end) {
    ZOO_DISPATCH(update_part, rule, flags, scalars, formats, Work{rows, num_rows, begin, end});
  });
  return true;
}

void lamb_direction_cpu(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
                        double* norms) {
  const std::vector<Part> parts = parts_of(rows, num_rows);
  std::vector<double> sums(2 * parts.size());
  split_evenly(int64_t(parts.size()), 1, total_of(rows, num_rows), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      ZOO_DISPATCH(lamb_direction, flags, scalars, formats, rows[parts[size_t(i)].row], parts[size_t(i)].begin,
                   parts[size_t(i)].end, &sums[size_t(2 * i)]);
  });
  for (int64_t i = 0; i < 2 * num_rows; ++i) norms[i] = 0;
  for (size_t i = 0; i < parts.size(); ++i)
    for (int k = 0; k < 2; ++k) norms[2 * parts[i].row + k] += sums[2 * i + size_t(k)];
}

void lamb_apply_cpu(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows) {
  const std::vector<Part> parts = parts_of(rows, num_rows);
  split_evenly(int64_t(parts.size()), 1, total_of(rows, num_rows), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      ZOO_DISPATCH(lamb_apply, flags, scalars, formats, rows[parts[size_t(i)].row], parts[size_t(i)].begin,
                   parts[size_t(i)].end);
  });
}

}  // namespace zoo
