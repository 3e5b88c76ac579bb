// What tests call of the library besides its operators.
#include "common/divider.h"
#include "common/squares.cuh"
#include "cuda_runtime.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void zoo_emulator_order(int order, uint64_t seed) {
  zoo_emulator::order = order;
  zoo_emulator::seed = seed;
}

EXPORT void zoo_emulator_mutant(int place, int change, int lane) {
  zoo_emulator::mutant = {place, zoo_emulator::Change(change), lane};
}

EXPORT uint64_t* zoo_emulator_hits() { return zoo_emulator::hits; }

EXPORT uint32_t zoo_quotient(uint32_t a, uint32_t b) { return zoo::Divider(b).quotient(a); }

EXPORT uint32_t zoo_rest(uint32_t a, uint32_t b) { return zoo::Divider(b).rest(a); }

// What shared memory has when each of `blocks` blocks begins, and something else when it ends: a variable and what the
// launch asked for, one after the other.
EXPORT void zoo_unwritten(uint32_t* found, int32_t blocks) {
  zoo_emulator::launch(blocks, 1, sizeof(uint32_t), nullptr, [&] {
    static uint32_t variable;
    zoo_emulator::declare(&variable, sizeof(variable));
    uint32_t* const asked_for = static_cast<uint32_t*>(zoo_emulator::shared_memory());
    found[2 * blockIdx.x] = std::exchange(variable, 7u);
    found[2 * blockIdx.x + 1] = std::exchange(*asked_for, 7u);
  });
}

// The threads of each block in the order in which they ran: up to a barrier of their warp, up to one of the block, and
// from there on. `ran` has room for three times all threads.
EXPORT void zoo_trace(int32_t* ran, int32_t blocks, int32_t threads) {
  const auto note = [&ran, threads] { *ran++ = int32_t(blockIdx.x) * threads + int32_t(threadIdx.x); };
  zoo_emulator::launch(blocks, threads, 0, nullptr, [&] {
    const int lanes = std::min(32, threads - int(threadIdx.x) / 32 * 32);
    note();
    __syncwarp(zoo_emulator::masked(zoo_emulator::MOST_PLACES - 1, 0xFFFFFFFFu >> (32 - lanes)));
    note();
    zoo_emulator::barrier(zoo_emulator::MOST_PLACES - 2);
    note();
  });
}

enum Meeting { TOGETHER, AT_TWO_BARRIERS, AT_TWO_EXCHANGES, NOT_NAMED, NOT_THERE };

// What the emulator says of a warp whose even and odd threads meet like this: the first `room` characters, or none.
EXPORT void zoo_meet(int32_t how, char* said, int32_t room) {
  const auto kernel = [how] {
    const bool odd = threadIdx.x % 2 != 0;
    zoo_emulator::barrier(odd && how == AT_TWO_BARRIERS ? 1 : 0);
    if (odd && how == NOT_THERE) return;
    const unsigned mask = how == NOT_NAMED ? 0x55555555u : 0xFFFFFFFFu;
    __syncwarp(zoo_emulator::masked(odd && how == AT_TWO_EXCHANGES ? 3 : 2, mask));
  };
  said[0] = 0;
  try {
    zoo_emulator::launch(1, 32, 0, nullptr, kernel);
  } catch (const std::runtime_error& error) {
    snprintf(said, size_t(room), "%s", error.what());
  }
}

// A kernel that writes number i of an array of four: in memory that is given, that the launch asked for, in a variable
// in shared memory, or of the thread, before or behind a barrier.
EXPORT void zoo_write(int32_t where, int32_t i, float* given) {
  zoo_emulator::launch(1, 2, 4 * sizeof(float), nullptr, [&] {
    static float variable[4];
    zoo_emulator::declare(&variable, sizeof(variable));
    float mine[4] = {};
    if (where == 4) zoo_emulator::barrier(0);
    float* const arrays[] = {given, static_cast<float*>(zoo_emulator::shared_memory()), variable, mine, mine};
    volatile float* const at = arrays[where];
    at[i] = 1.0f;
    given[0] = at[0];
  });
}

struct NoRow {};

// sums[row] of parts[first[row]], ..., parts[first[row + 1] - 1], for as many as FEW rows.
EXPORT void zoo_row_sums(const double* parts, const int32_t* first, int32_t rows, double* sums) {
  zoo::Batch<NoRow, zoo::FEW> batch{};
  batch.count = rows;
  std::copy(first, first + rows + 1, batch.first);
  zoo_emulator::launch(rows, zoo::THREADS, 0, nullptr, [&] { zoo::row_sums_kernel<1>(batch, parts, sums); });
}
