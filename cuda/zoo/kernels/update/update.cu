// The update on GPUs: the algebra and the memory contract of update.h. Compile with -fmad=false, for the bits of the
// CPU.
#include <type_traits>

#include "../common/batch.cuh"
#include "../common/blocks.cuh"
#include "update.h"

namespace zoo {
namespace {

constexpr int64_t PART = 16384;

template <int RULE, int FLAGS, class Rows>
__global__ void __launch_bounds__(THREADS)
    update_kernel(const __grid_constant__ Rows batch, const Scalars given, const double* there, const Formats f) {
  if (there != nullptr && there[NUM_SCALARS] != 0) return;
  const Scalars c = there == nullptr ? given : rounded(there);
  const auto [index, begin, end] = part_of(batch, int(blockIdx.x), PART);
  const Row& row = batch.rows[index];
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
    for (int i = 0; i < 4; ++i) p.x[i] = updated<RULE, FLAGS>(c, rate, p.x[i], g.x[i], s[0].x[i], s[1].x[i], s[2].x[i]);
    for (int k = 0; k < MAX_STATES; ++k)
      if (k < kept) store4(s[k], row.state[k], f.state, at, count);
    if (has_master) store4(p, row.master, F32, at, count);
    store4(p, row.param, f.param, at, count);
  }
}

// One block.
__global__ void __launch_bounds__(THREADS) scalars_kernel(const Advance a) {
  __shared__ bool counts;
  if (threadIdx.x == 0) counts = make_scalars(a);
  __syncthreads();  // the first thread has read the number of steps, the others know whether there is one more
  if (!counts) return;
  for (int64_t i = threadIdx.x; i < a.num_steps; i += THREADS) a.steps[i] += 1.0f;
}

template <class Rows>
struct Launcher {
  const Rows& batch;
  const Scalars& scalars;
  const double* there;
  Formats formats;
  cudaStream_t stream;

  template <int RULE, int FLAGS>
  void operator()() const {
    const int blocks = batch.first[batch.count];
    if (blocks > 0) update_kernel<RULE, FLAGS><<<blocks, THREADS, 0, stream>>>(batch, scalars, there, formats);
  }
};

}  // namespace

namespace cuda {

int32_t update(int rule, int flags, const Scalars& scalars, const double* there, Formats formats, const Row* rows,
               int64_t num_rows, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return each_batch(rows, num_rows, PART, [&](const auto& batch, int64_t, int64_t) {
    with_rule(rule, flags, Launcher<std::decay_t<decltype(batch)>>{batch, scalars, there, formats, s});
  });
}

int32_t update_scalars(const Advance& a, void* stream) {
  scalars_kernel<<<1, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
