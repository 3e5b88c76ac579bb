// Packed weights times x in 8 bits on CUDA. A block of threads has a block of 32 rows, a thread of each warp a row; a
// warp takes 32 columns at a time, and what eight warps found is added up in order.
#include "../common/device.cuh"
#include "int8_activations.h"

namespace zoo {
namespace {

constexpr int64_t ROWS = PACKED_ROWS;
constexpr int OF_BLOCK = THREADS / WARP;  // warps

// A thread for each block of columns of each token.
__global__ void __launch_bounds__(THREADS) packed_int8_codes_kernel(PackedLinear c, Int8Activations x) {
  const int64_t blocks = Int8Activations::blocks(c.w), of_group = Int8Activations::blocks_of_group(c.w);
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x, m = index / blocks, block = index % blocks;
  if (m >= c.tokens) return;
  const int64_t first = block % of_group * ACTIVATION_BLOCK, left = c.w.group - first;
  const int64_t at = m * c.w.columns + block / of_group * c.w.group + first;
  const int count = int(left < ACTIVATION_BLOCK ? left : ACTIVATION_BLOCK);
  x.scales[index] = quantise_block(count, x.codes + at, [&](int i) { return load(c.x, c.dtype, at + i); });
  int32_t sum = 0;
  for (int i = 0; i < count; ++i) sum += x.codes[at + i];
  x.sums[index] = sum;
}

// A thread for each group of each token.
__global__ void __launch_bounds__(THREADS) packed_int8_sums_kernel(PackedLinear c, Int8Activations x) {
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t of_group = Int8Activations::blocks_of_group(c.w);
  if (index >= c.tokens * c.w.groups()) return;
  float z = 0.0f;
  for (int64_t b = index * of_group; b < (index + 1) * of_group; ++b) z += x.scales[b] * float(x.sums[b]);
  x.group_sums[index] = z;
}

// Four codes as signed bytes, and what those are too small by.
template <int BITS, bool SYMMETRIC>
__device__ __forceinline__ int32_t signed_codes(uint32_t codes) {
  if (BITS == 8) return int32_t(SYMMETRIC ? codes : codes ^ 0x80808080u);
  return int32_t(SYMMETRIC ? codes ^ 0x08080808u : codes);
}

template <int BITS, bool SYMMETRIC>
__device__ __forceinline__ int32_t offset_of_codes() {
  return BITS == 8 ? (SYMMETRIC ? 0 : 128) : (SYMMETRIC ? -8 : 0);
}

// d·I of one block of columns. codes_at(k): four codes from column k on, without their sign.
template <int BITS, bool SYMMETRIC, class Fn>
__device__ __forceinline__ float part_of(const PackedLinear& c, const Int8Activations& x, int64_t m, int64_t block,
                                         const Fn& codes_at) {
  const int64_t of_group = Int8Activations::blocks_of_group(c.w), index = m * Int8Activations::blocks(c.w) + block;
  const int64_t first = block % of_group * ACTIVATION_BLOCK, begin = block / of_group * c.w.group + first;
  const int64_t left = c.w.group - first, end = begin + (left < ACTIVATION_BLOCK ? left : ACTIVATION_BLOCK);
  int32_t sum = offset_of_codes<BITS, SYMMETRIC>() * x.sums[index];
  for (int64_t k = begin; k < end; k += 4) {
    const int32_t p = *reinterpret_cast<const int32_t*>(x.codes + m * c.w.columns + k);
    sum = __dp4a(signed_codes<BITS, SYMMETRIC>(codes_at(k)), p, sum);
  }
  return x.scales[index] * float(sum);
}

// y of a row: its blocks of columns are added in their order.
struct Total {
  float part = 0.0f, total = 0.0f;

  __device__ __forceinline__ void add(float found) { part += found; }
  __device__ __forceinline__ void end_group(const PackedLinear& c, const Int8Activations& x, int64_t m, int64_t g,
                                            int64_t at) {
    total += c.w.scales[at] * part;
    if (c.w.minima != nullptr) total += c.w.minima[at] * x.group_sums[m * c.w.groups() + g];
    part = 0.0f;
  }
  __device__ __forceinline__ void write(const PackedLinear& c, int64_t m, int64_t row) const {
    const float y = c.bias == nullptr ? total : total + load(c.bias, c.bias_dtype, row);
    store(c.y, c.dtype, m * c.w.rows + row, y);
  }
};

// Whole blocks of rows along x, tokens along y.
template <int BITS, bool SYMMETRIC>
__global__ void __launch_bounds__(THREADS) packed_int8_kernel(PackedLinear c, Int8Activations x) {
  const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP;
  const int64_t of_group = Int8Activations::blocks_of_group(c.w), blocks = Int8Activations::blocks(c.w);
  const uint8_t* const lines =
      static_cast<const uint8_t*>(c.w.q) + int64_t(blockIdx.x) * (c.w.columns / 2) * (8 * BITS);
  const int place = place_in_line(BITS, row, 0), shift = BITS == 8 ? 0 : row / 16 * 4;
  const auto codes_at = [&](int64_t k) {
    const uint8_t* const from = lines + k / 2 * (8 * BITS) + place;
    const uint32_t first = *reinterpret_cast<const uint16_t*>(from);
    const uint32_t both = first | uint32_t(*reinterpret_cast<const uint16_t*>(from + 8 * BITS)) << 16;
    return BITS == 8 ? both : both >> shift & 0x0F0F0F0Fu;
  };
  __shared__ float parts[OF_BLOCK][WARP];
  for (int64_t m = blockIdx.y; m < c.tokens; m += gridDim.y) {
    Total sum;
    for (int64_t first = 0; first < blocks; first += OF_BLOCK) {
      if (first + warp < blocks) parts[warp][row] = part_of<BITS, SYMMETRIC>(c, x, m, first + warp, codes_at);
      __syncthreads();
      if (warp == 0)
        for (int64_t b = first; b < blocks && b < first + OF_BLOCK; ++b) {
          sum.add(parts[b - first][row]);
          const int64_t g = b / of_group;
          if ((b + 1) % of_group == 0) sum.end_group(c, x, m, g, (int64_t(blockIdx.x) * c.w.groups() + g) * ROWS + row);
        }
      __syncthreads();
    }
    if (warp == 0) sum.write(c, m, int64_t(blockIdx.x) * ROWS + row);
  }
}

// The rows that are no whole block: a warp for each, along x, and tokens along y.
template <int BITS, bool SYMMETRIC>
__global__ void __launch_bounds__(WARP) packed_int8_rest_kernel(PackedLinear c, Int8Activations x) {
  const int64_t row = c.w.rows / ROWS * ROWS + blockIdx.x;
  const int64_t of_group = Int8Activations::blocks_of_group(c.w), blocks = Int8Activations::blocks(c.w);
  const uint8_t* const q = static_cast<const uint8_t*>(c.w.q) + row * c.w.columns * BITS / 8;
  const auto codes_at = [q](int64_t k) {
    if (BITS == 8) return *reinterpret_cast<const uint32_t*>(q + k);
    const uint32_t four = *reinterpret_cast<const uint16_t*>(q + k / 2);
    return (four & 15u) | (four & 0xF0u) << 4 | (four & 0xF00u) << 8 | (four & 0xF000u) << 12;
  };
  for (int64_t m = blockIdx.y; m < c.tokens; m += gridDim.y) {
    Total sum;
    for (int64_t first = 0; first < blocks; first += WARP) {
      const int64_t mine = first + threadIdx.x;
      const float part = mine < blocks ? part_of<BITS, SYMMETRIC>(c, x, m, mine, codes_at) : 0.0f;
      for (int i = 0; i < WARP; ++i) {
        const float found = __shfl_sync(ALL, part, i);
        const int64_t b = first + i, g = b / of_group;
        if (b >= blocks) continue;
        sum.add(found);
        if ((b + 1) % of_group == 0) sum.end_group(c, x, m, g, row * c.w.groups() + g);
      }
    }
    if (threadIdx.x == 0) sum.write(c, m, row);
  }
}

template <int BITS, bool SYMMETRIC>
void launch(const PackedLinear& c, const Int8Activations& x, cudaStream_t stream) {
  const unsigned tokens = c.tokens < MAX_COLUMNS ? unsigned(c.tokens) : MAX_COLUMNS;
  const int64_t blocks = c.w.rows / ROWS, rest = c.w.rows % ROWS;
  if (blocks > 0) packed_int8_kernel<BITS, SYMMETRIC><<<dim3(unsigned(blocks), tokens), THREADS, 0, stream>>>(c, x);
  if (rest > 0) packed_int8_rest_kernel<BITS, SYMMETRIC><<<dim3(unsigned(rest), tokens), WARP, 0, stream>>>(c, x);
}

}  // namespace

namespace cuda {

int32_t packed_linear_int8(const PackedLinear& c, const Int8Activations& x, void* stream) {
  const cudaStream_t s = static_cast<cudaStream_t>(stream);
  const int64_t of_tokens = c.tokens * Int8Activations::blocks(c.w);
  if (c.w.rows / ROWS > MAX_ROWS || ceil_div(of_tokens, THREADS) > MAX_ROWS) return cudaErrorInvalidValue;
  if (c.tokens == 0) return cudaSuccess;
  if (of_tokens > 0) packed_int8_codes_kernel<<<blocks_for(of_tokens, THREADS), THREADS, 0, s>>>(c, x);
  if (of_tokens > 0 && c.w.minima != nullptr) {
    packed_int8_sums_kernel<<<blocks_for(c.tokens * c.w.groups(), THREADS), THREADS, 0, s>>>(c, x);
  }
  const auto run = c.w.minima == nullptr ? c.w.bits == 8 ? launch<8, true> : launch<4, true>
                   : c.w.bits == 8       ? launch<8, false>
                                         : launch<4, false>;
  run(c, x, s);
  return cudaGetLastError();
}

}  // namespace cuda
}  // namespace zoo
