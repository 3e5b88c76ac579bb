// Barriers and exchanges by their numbers, which the translation gives them, and the mutant of one that a test asks
// for.
#pragma once

#include <cstdint>

namespace zoo_emulator {

constexpr int WARP = 32;
constexpr int MOST_PLACES = 512;

enum Change {
  NONE,
  TAKEN_AWAY,    // a barrier that nobody waits at; an exchange that takes what others have brought so far
  OF_WARP,       // __syncthreads as __syncwarp
  WITHOUT_LANE,  // a mask without the bit of `lane`
};

struct Mutant {
  int place = -1;
  Change change = NONE;
  int lane = 0;
};

inline Mutant mutant;
inline uint64_t hits[MOST_PLACES];  // how many threads have come to each place
inline int place = -1;              // that the thread which runs has come to
inline bool waits = true;           // whether its exchange does

inline Change arrive(int at) {
  ++hits[at];
  place = at;
  return mutant.place == at ? mutant.change : NONE;
}

// The mask of the exchange at a place.
inline unsigned masked(int at, unsigned mask) {
  const Change change = arrive(at);
  waits = change != TAKEN_AWAY;
  return change == WITHOUT_LANE ? mask & ~(1u << mutant.lane) : mask;
}

}  // namespace zoo_emulator
