// The update on GPUs: the algebra and the memory contract of update.h. Compile with -fmad=false, for the bits of the CPU.
//
// A launch takes up to ROWS rows and PARTS parts of PART elements by value, in its arguments: no table has to be copied
// to the device first, and nothing has to be kept alive after the call.
#include <cuda_runtime.h>

#include "../common/blocks.cuh"
#include "update_cuda.h"

namespace zoo {
namespace {

constexpr int ROWS = 24, PARTS = 160, THREADS = 256;
constexpr int64_t PART = 16384;

struct Launch {
  Row rows[ROWS];
  int32_t part[PARTS];    // which part of its row
  uint8_t row_of[PARTS];  // which row
};
static_assert(sizeof(Launch) + sizeof(Scalars) + sizeof(Formats) < 4096, "arguments of a kernel are at most 4 KB");

template <int RULE, int FLAGS>
__global__ void __launch_bounds__(THREADS) update_kernel(const Launch launch, const Scalars c, const Formats f) {
  const Row& row = launch.rows[launch.row_of[blockIdx.x]];
  const int64_t begin = launch.part[blockIdx.x] * PART;
  const int64_t end = begin + PART < row.n ? begin + PART : row.n;
  const bool has_master = row.master != nullptr;
  void* const source = has_master ? row.master : row.param;
  const Dtype source_dtype = has_master ? F32 : f.param;
  const float rate = c.rate * row.ratio;
  const int kept = num_states(RULE, FLAGS);
  for (int64_t at = begin + 4 * threadIdx.x; at < end; at += 4 * THREADS) {
    const int count = end - at < 4 ? int(end - at) : 4;
    Four p = load4(source, source_dtype, at, count);
    const Four g = load4(row.grad, f.grad, at, count);
    Four s[MAX_STATES] = {};
    for (int k = 0; k < MAX_STATES; ++k)
      if (k < kept) s[k] = load4(row.state[k], f.state, at, count);
    for (int i = 0; i < 4; ++i)
      p.x[i] = updated<RULE, FLAGS>(c, rate, p.x[i], g.x[i], s[0].x[i], s[1].x[i], s[2].x[i]);
    for (int k = 0; k < MAX_STATES; ++k)
      if (k < kept) store4(s[k], row.state[k], f.state, at, count);
    if (has_master) store4(p, row.master, F32, at, count);
    store4(p, row.param, f.param, at, count);
  }
}

struct Launcher {
  const Launch& launch;
  int parts;
  const Scalars& scalars;
  Formats formats;
  cudaStream_t stream;

  template <int RULE, int FLAGS>
  void operator()() const {
    update_kernel<RULE, FLAGS><<<parts, THREADS, 0, stream>>>(launch, scalars, formats);
  }
};

}  // namespace
}  // namespace zoo

int32_t zoo_update_cuda(int32_t rule, int32_t flags, const zoo::Scalars* scalars, const zoo::Formats* formats,
                        const zoo::Row* rows, int64_t num_rows, void* stream) {
  using namespace zoo;
  Launch launch = {};
  int used_rows = 0, parts = 0;
  bool known = true;
  const auto flush = [&] {
    if (parts > 0)
      known = with_rule(rule, flags, Launcher{launch, parts, *scalars, *formats, static_cast<cudaStream_t>(stream)});
    used_rows = parts = 0;
  };
  for (int64_t i = 0; i < num_rows && known; ++i) {
    if (rows[i].n == 0) continue;
    if (used_rows == ROWS) flush();
    launch.rows[used_rows] = rows[i];
    for (int64_t part = 0; part * PART < rows[i].n; ++part) {
      if (parts == PARTS) {
        flush();
        launch.rows[0] = rows[i];
      }
      launch.part[parts] = int32_t(part);
      launch.row_of[parts++] = uint8_t(used_rows);
    }
    ++used_rows;
  }
  flush();
  return known ? int32_t(cudaGetLastError()) : -1;
}
