#include "gating_cpu.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "../common/parallel.h"

namespace zoo {
namespace {

// fn(place in memory, expert) for the assignments [begin, end) in the order of priority.
template <class Fn>
void each_assignment(const Places& c, int64_t begin, int64_t end, const Fn& fn) {
  if (!c.choices_first) {
    for (int64_t s = begin; s < end; ++s) fn(s, c.indices[s]);
    return;
  }
  const int64_t total = c.tokens * c.choices;
  for (int64_t s = begin, at = begin < end ? assignment(c, begin) : 0; s < end; ++s) {
    fn(at, c.indices[at]);
    at += c.choices;
    if (at >= total) at -= total - 1;  // on to the first token's next choice
  }
}

// Of n assignments to one expert, at `at` in the order of priority and with these keys, the first capacity ones by key get
// places in that order. `scratch`: n numbers.
void keep_greatest(const Places& c, const int64_t* at, const uint32_t* keys, int64_t n, uint32_t* scratch) {
  uint32_t least = 0xFFFFFFFFu;  // of what is kept
  int64_t ties = 0;              // how many of those that are equal to it
  if (c.capacity > 0) {
    std::copy(keys, keys + n, scratch);
    std::nth_element(scratch, scratch + c.capacity - 1, scratch + n, std::greater<uint32_t>());
    least = scratch[c.capacity - 1];
    ties = c.capacity;
    for (int64_t i = 0; i < n; ++i) ties -= keys[i] > least;
  }
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool equal = keys[i] == least, kept = keys[i] > least || (equal && ties > 0);
    ties -= equal;
    c.positions[at[i]] = kept ? place : -1;
    place += kept;
  }
}

// Once every assignment has its place among all of its expert: that of experts whose demand is above the capacity.
void places_by_key(const Places& c) {
  std::vector<int64_t> first(static_cast<size_t>(c.experts));
  int64_t total = 0;
  for (int64_t e = 0; e < c.experts; ++e) {
    first[size_t(e)] = total;
    if (c.demand[e] > c.capacity) total += c.demand[e];
  }
  if (total == 0) return;
  std::vector<int64_t> at(static_cast<size_t>(total));
  std::vector<uint32_t> keys(static_cast<size_t>(total)), scratch(static_cast<size_t>(total));
  const int64_t n = c.tokens * c.choices;
  split_evenly(n, 1, n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t e = c.indices[i];
      if (c.demand[e] <= c.capacity) continue;
      const size_t to = size_t(first[size_t(e)] + c.positions[i]);
      at[to] = i;
      keys[to] = key_of(c, i);
    }
  });
  split_evenly(c.experts, 1, total, [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      if (c.demand[e] <= c.capacity) continue;
      const int64_t from = first[size_t(e)];
      keep_greatest(c, at.data() + from, keys.data() + from, c.demand[e], scratch.data() + from);
    }
  });
}

}  // namespace

void gate_cpu(const Gate& c) {
  split_evenly(c.tokens, 1, c.tokens * c.experts, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(2 * c.experts + c.choices));
    ZOO_DISPATCH(gate_rows, c, begin, end, scratch.data());
  });
}

void gate_backward_cpu(const GateBackward& c) {
  split_evenly(c.tokens, 1, c.tokens * c.experts, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(3 * c.experts));
    ZOO_DISPATCH(gate_backward_rows, c, begin, end, scratch.data());
  });
}

void places_cpu(const Places& c) {
  const int64_t n = c.tokens * c.choices, parts = num_threads_for(n);
  std::vector<int64_t> taken(size_t(parts * c.experts));
  const auto of_parts = [&](const auto& fn) {
    split_evenly(parts, 1, n, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        int64_t* mine = taken.data() + p * c.experts;
        each_assignment(c, n * p / parts, n * (p + 1) / parts, [&](int64_t at, int64_t e) { fn(at, mine[e]++); });
      }
    });
  };
  of_parts([](int64_t, int64_t) {});
  for (int64_t e = 0; e < c.experts; ++e) {
    int64_t sum = 0;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t mine = taken[size_t(p * c.experts + e)];
      taken[size_t(p * c.experts + e)] = sum;
      sum += mine;
    }
    c.demand[e] = sum;
    c.counts[e] = count_of(sum, c.capacity);
  }
  const int64_t capacity = capacity_in_order(c);
  of_parts([&](int64_t at, int64_t before_me) { c.positions[at] = place_of(before_me, capacity); });
  if (c.key != nullptr && c.capacity >= 0) places_by_key(c);
}

void permute_cpu(const Permute& c) {
  if (c.row_bytes == 0) return;
  const size_t bytes = size_t(c.row_bytes);
  split_evenly(c.rows, 1, c.rows * c.row_bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      char* to = static_cast<char*>(c.y) + row * c.row_bytes;
      const int64_t at = c.source[row];
      if (at < 0) memset(to, 0, bytes);
      else memcpy(to, static_cast<const char*>(c.x) + at / c.choices * c.row_bytes, bytes);
    }
  });
}

void unpermute_cpu(const Unpermute& c) {
  split_evenly(c.tokens, 1, c.tokens * c.choices * c.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(2 * c.dim));
    ZOO_DISPATCH(unpermute_rows, c, begin, end, scratch.data());
  });
}

void unpermute_backward_cpu(const UnpermuteBackward& c) {
  // Of dropped assignments, to which no row leads.
  const int64_t assignments = c.tokens * c.choices;
  if (assignments > 0) memset(c.grad_weights, 0, size_t(assignments) * (c.weight_dtype == F32 ? 4 : 2));
  split_evenly(c.rows, 1, c.rows * c.dim, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(3 * c.dim));
    ZOO_DISPATCH(unpermute_backward_rows, c, begin, end, scratch.data());
  });
}

int64_t first_outside(const int64_t* numbers, int64_t n, int64_t low, int64_t high) {
  for (int64_t i = 0; i < n; ++i)
    if (numbers[i] < low || numbers[i] >= high) return i;
  return -1;
}

int64_t invert(const int64_t* rows, int64_t n, int64_t num_rows, int64_t* source) {
  for (int64_t row = 0; row < num_rows; ++row) source[row] = -1;
  for (int64_t s = 0; s < n; ++s) {
    if (rows[s] < 0) continue;
    if (source[rows[s]] >= 0) return s;
    source[rows[s]] = s;
  }
  return -1;
}

}  // namespace zoo
