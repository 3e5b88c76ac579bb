// LAMB on GPUs: the two passes of lamb.cpp, with its bits. Compile with -fmad=false.
#include <type_traits>

#include "../common/blocks.cuh"
#include "../common/squares.cuh"
#include "update.h"

namespace zoo {
namespace {

template <int FLAGS, class Rows>
__global__ void __launch_bounds__(THREADS) direction_kernel(const __grid_constant__ Rows batch, const Scalars given,
                                                            const double* there, const Formats f, double* parts) {
  alignas(16) __shared__ float tiles[2][TILE];  // p and d
  const Scalars c = there == nullptr ? given : rounded(there);
  if (there != nullptr && there[NUM_SCALARS] != 0) {
    if (threadIdx.x < 2) parts[2 * blockIdx.x + threadIdx.x] = 0;
    return;
  }
  const auto [index, begin, end] = part_of(batch, int(blockIdx.x), SQUARES_PART);
  const Row& row = batch.rows[index];
  const void* const source = row.master != nullptr ? row.master : row.param;
  const Dtype source_dtype = row.master != nullptr ? F32 : f.param;
  double lane = 0;  // the first half of the first warp has the lanes of p, the second those of d
  for (int64_t at = begin; at < end; at += TILE) {
    const int count = end - at < TILE ? int(end - at) : TILE;
    for (int i = 4 * threadIdx.x; i < count; i += 4 * THREADS) {
      const int width = count - i < 4 ? count - i : 4;
      const Four p = load4(source, source_dtype, at + i, width), g = load4(row.grad, f.grad, at + i, width);
      Four m = load4(row.state[0], F32, at + i, width), v = load4(row.state[1], F32, at + i, width), d;
      for (int k = 0; k < 4; ++k) {
        advance_moments(c, c.grad_scale * g.x[k], m.x[k], v.x[k]);
        d.x[k] = moment_direction<LAMB, FLAGS>(c, p.x[k], m.x[k], v.x[k]);
      }
      store4(m, row.state[0], F32, at + i, width);
      store4(v, row.state[1], F32, at + i, width);
      *reinterpret_cast<float4*>(tiles[0] + i) = make_float4(p.x[0], p.x[1], p.x[2], p.x[3]);
      *reinterpret_cast<float4*>(tiles[1] + i) = make_float4(d.x[0], d.x[1], d.x[2], d.x[3]);
    }
    __syncthreads();
    if (threadIdx.x < WARP) add_tile(tiles[threadIdx.x / SHORT_LANES], count, lane);
    __syncthreads();
  }
  if (threadIdx.x < WARP) {
    const double sum = sum_lanes(lane);
    if (threadIdx.x % SHORT_LANES == 0) parts[2 * blockIdx.x + threadIdx.x / SHORT_LANES] = sum;
  }
}

template <int FLAGS, class Rows>
__global__ void __launch_bounds__(THREADS) apply_kernel(const __grid_constant__ Rows batch, const Scalars given,
                                                        const double* there, const Formats f, const float* ratios) {
  if (there != nullptr && there[NUM_SCALARS] != 0) return;
  const Scalars c = there == nullptr ? given : rounded(there);
  const auto [index, begin, end] = part_of(batch, int(blockIdx.x), SQUARES_PART);
  const Row& row = batch.rows[index];
  const bool has_master = row.master != nullptr;
  void* const source = has_master ? row.master : row.param;
  const Dtype source_dtype = has_master ? F32 : f.param;
  const float rate = c.rate * ratios[index];
  for (int64_t at = begin + 4 * threadIdx.x; at < end; at += 4 * THREADS) {
    const int count = end - at < 4 ? int(end - at) : 4;
    Four p = load4(source, source_dtype, at, count);
    const Four m = load4(row.state[0], F32, at, count), v = load4(row.state[1], F32, at, count);
    for (int k = 0; k < 4; ++k)
      p.x[k] = c.decay * p.x[k] - rate * moment_direction<LAMB, FLAGS>(c, p.x[k], m.x[k], v.x[k]);
    if (has_master) store4(p, row.master, F32, at, count);
    store4(p, row.param, f.param, at, count);
  }
}

// fn(FLAGS) as a constant.
template <class Fn>
void with_flags(int32_t flags, const Fn& fn) {
  if (flags == (COUPLED | EPS_INSIDE)) fn(std::integral_constant<int, COUPLED | EPS_INSIDE>());
  else if (flags == EPS_INSIDE) fn(std::integral_constant<int, EPS_INSIDE>());
  else if (flags == COUPLED) fn(std::integral_constant<int, COUPLED>());
  else fn(std::integral_constant<int, 0>());
}

}  // namespace

namespace cuda {

int32_t lamb_direction(int flags, const Scalars& scalars, const double* there, Formats formats, const Row* rows,
                       int64_t num_rows, double* parts, double* norms, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return each_batch(rows, num_rows, SQUARES_PART, [&](const auto& batch, int64_t first_row, int64_t first_part) {
    const int blocks = batch.first[batch.count];
    double* mine = parts + 2 * first_part;
    with_flags(flags, [&](auto known) {
      constexpr int FLAGS = decltype(known)::value;
      if (blocks > 0) direction_kernel<FLAGS><<<blocks, THREADS, 0, s>>>(batch, scalars, there, formats, mine);
    });
    row_sums_kernel<2><<<2 * batch.count, THREADS, 0, s>>>(batch, mine, norms + 2 * first_row);
  });
}

int32_t lamb_apply(int flags, const Scalars& scalars, const double* there, Formats formats, const Row* rows,
                   int64_t num_rows, const float* ratios, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return each_batch(rows, num_rows, SQUARES_PART, [&](const auto& batch, int64_t first_row, int64_t) {
    const int blocks = batch.first[batch.count];
    with_flags(flags, [&](auto known) {
      constexpr int FLAGS = decltype(known)::value;
      if (blocks > 0)
        apply_kernel<FLAGS><<<blocks, THREADS, 0, s>>>(batch, scalars, there, formats, ratios + first_row);
    });
  });
}

}  // namespace cuda
}  // namespace zoo
