// Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror and Shaw 2011, section 3.3 and table 2):
// four random words of 32 bits from a counter of 128 bits and a key of 64, without a state, so that any element's
// number is known anywhere, in any order.
//
// Element i of a tensor gets word i mod 4 of the counter (i / 4 in the lower 64 bits, offset in the upper), key = seed.
#pragma once

#include "numbers.h"

namespace zoo {

struct Philox {
  uint64_t seed, offset;
};

inline namespace ZOO_ISA {

// One of the ten rounds.
ZOO_HD void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
  c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
  c1 = uint32_t(p1);
  c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
  c3 = uint32_t(p0);
}

ZOO_HD void philox(const Philox& g, uint64_t index, uint32_t word[4]) {
  word[0] = uint32_t(index);
  word[1] = uint32_t(index >> 32);
  word[2] = uint32_t(g.offset);
  word[3] = uint32_t(g.offset >> 32);
  uint32_t k0 = uint32_t(g.seed), k1 = uint32_t(g.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    philox_round(word[0], word[1], word[2], word[3], k0, k1);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

}  // namespace ZOO_ISA
}  // namespace zoo
