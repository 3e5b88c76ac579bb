// The order in which the threads of a block run, and its blocks: what a test draws.
#pragma once

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace zoo_emulator {

enum Order {
  RISING,
  FALLING,
  OF_BLOCK,     // a permutation of the threads for each block
  OF_INTERVAL,  // another one each time that threads go on
  AHEAD,        // a warp goes on until the barrier of the block stops it, then another one
  MIXED,        // warps in turns that are drawn: each may be as far ahead of the others as barriers let it
};

inline int order = RISING;
inline uint64_t seed = 0;

// Numbers that follow from the seed alone (splitmix64, Steele et al. 2014).
struct Dice {
  uint64_t state;

  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  unsigned below(size_t n) { return unsigned(next() % n); }
};

// 0, ..., n - 1 in the order that was asked for.
inline std::vector<unsigned> arranged(size_t n, Dice& dice) {
  std::vector<unsigned> turns(n);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == FALLING)
    for (size_t i = 0; i < n; ++i) turns[i] = unsigned(n - 1 - i);
  if (order > FALLING)
    for (size_t i = n; i > 1; --i) std::swap(turns[i - 1], turns[dice.below(i)]);
  return turns;
}

}  // namespace zoo_emulator
