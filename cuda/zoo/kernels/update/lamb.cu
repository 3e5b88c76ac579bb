// LAMB on GPUs: the two passes of lamb.cpp, with its bits. Compile with -fmad=false.
#include "../common/blocks.cuh"
#include "../common/squares.cuh"
#include "update.h"

namespace zoo {
namespace {

template <int FLAGS>
__global__ void __launch_bounds__(THREADS) direction_kernel(const __grid_constant__ Batch<Row> batch, const Scalars c,
                                                            const Formats f, double* parts) {
  __shared__ alignas(16) float tiles[2][TILE];  // p and d
  const int index = batch.row_of(blockIdx.x);
  const Row& row = batch.rows[index];
  const int64_t begin = (int(blockIdx.x) - batch.first[index]) * SQUARES_PART;
  const int64_t end = begin + SQUARES_PART < row.n ? begin + SQUARES_PART : row.n;
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

template <int FLAGS>
__global__ void __launch_bounds__(THREADS) apply_kernel(const __grid_constant__ Batch<Row> batch, const Scalars c,
                                                        const Formats f, const float* ratios) {
  const int index = batch.row_of(blockIdx.x);
  const Row& row = batch.rows[index];
  const int64_t begin = (int(blockIdx.x) - batch.first[index]) * SQUARES_PART;
  const int64_t end = begin + SQUARES_PART < row.n ? begin + SQUARES_PART : row.n;
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

// Calls f.template operator()<FLAGS>().
template <class F>
void with_flags(int32_t flags, const F& f) {
  if (flags == (COUPLED | EPS_INSIDE)) f.template operator()<COUPLED | EPS_INSIDE>();
  else if (flags == EPS_INSIDE) f.template operator()<EPS_INSIDE>();
  else if (flags == COUPLED) f.template operator()<COUPLED>();
  else f.template operator()<0>();
}

struct Direction {
  const Batch<Row>& batch;
  const Scalars& scalars;
  Formats formats;
  double* parts;
  cudaStream_t stream;

  template <int FLAGS>
  void operator()() const {
    const int blocks = batch.first[batch.count];
    if (blocks > 0) direction_kernel<FLAGS><<<blocks, THREADS, 0, stream>>>(batch, scalars, formats, parts);
  }
};

struct Apply {
  const Batch<Row>& batch;
  const Scalars& scalars;
  Formats formats;
  const float* ratios;
  cudaStream_t stream;

  template <int FLAGS>
  void operator()() const {
    const int blocks = batch.first[batch.count];
    if (blocks > 0) apply_kernel<FLAGS><<<blocks, THREADS, 0, stream>>>(batch, scalars, formats, ratios);
  }
};

}  // namespace

namespace cuda {

int32_t lamb_direction(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
                       double* parts, double* norms, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return each_batch(rows, num_rows, SQUARES_PART, [&](const Batch<Row>& batch, int64_t first_row, int64_t first_part) {
    with_flags(flags, Direction{batch, scalars, formats, parts + 2 * first_part, s});
    row_sums_kernel<Row, 2><<<2 * batch.count, THREADS, 0, s>>>(batch, parts + 2 * first_part, norms + 2 * first_row);
  });
}

int32_t lamb_apply(int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows,
                   const float* ratios, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  return each_batch(rows, num_rows, SQUARES_PART, [&](const Batch<Row>& batch, int64_t first_row, int64_t) {
    with_flags(flags, Apply{batch, scalars, formats, ratios + first_row, s});
  });
}

}  // namespace cuda
}  // namespace zoo
