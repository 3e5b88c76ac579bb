// A linear layer on packed weights as operators of torch.
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <optional>
#include <vector>

#include "../common/operators.h"
#include "int8_activations.h"
#include "packed_linear.h"

namespace zoo {
namespace {

constexpr int64_t TILE_BYTES = 4 << 20;  // of W as numbers, by tiles

PackedWeight checked(const at::Tensor& q, const at::Tensor& scales, const std::optional<at::Tensor>& minima,
                     int64_t rows, int64_t columns, int64_t bits, int64_t group, const at::Device& device) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits=", bits, "; it must be 8 or 4.");
  TORCH_CHECK_VALUE(rows >= 0, "rows=", rows, "; it must be at least 0.");
  TORCH_CHECK_VALUE(group >= 16 && group % 16 == 0 && columns % group == 0, "group_size=", group, " for rows of ",
                    columns, " elements; it must be a multiple of 16 that divides them.");
  check_flat(q, "q", rows * columns * bits / 8, minima ? at::kByte : at::kChar, device);
  check_flat(scales, "scales", rows * (columns / group), at::kFloat, device);
  if (minima) check_flat(*minima, "minima", rows * (columns / group), at::kFloat, device);
  PackedWeight w{};
  w.q = q.const_data_ptr();
  w.scales = scales.const_data_ptr<float>();
  w.minima = minima ? minima->const_data_ptr<float>() : nullptr;
#if defined(ZOO_CUDA)
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(w.q) % 16 == 0,
                    "q must begin at a multiple of 16 bytes on CUDA: pass a .clone().");
#endif
  w.rows = rows;
  w.columns = columns;
  w.group = group;
  w.bits = int32_t(bits);
  return w;
}

int64_t most_fused_tokens(Dtype dtype) {
#if defined(ZOO_CUDA)
  return PACKED_TOKENS;
#else
  int64_t tokens = 0;
  ZOO_DISPATCH(packed_most_tokens, dtype, tokens);
  return tokens;
#endif
}

// What tiles of W are made in: the dtype of the product, and fp32 for fp16 on CPUs, where torch multiplies that slowly.
at::ScalarType tile_dtype(const at::Tensor& t) {
  return t.is_cpu() && t.scalar_type() == at::kHalf ? at::kFloat : t.scalar_type();
}

// How many rows, or columns, of `length` elements a tile has: a multiple of 32.
int64_t tile_of(int64_t length) {
  const int64_t fit = TILE_BYTES / (4 * (length + 1)) / PACKED_ROWS * PACKED_ROWS;
  return fit > PACKED_ROWS ? fit : PACKED_ROWS;
}

at::Tensor columns_of(const PackedWeight& w, const at::Tensor& like, at::ScalarType dtype, int64_t row,
                      int64_t num_rows, int64_t begin, int64_t count) {
  at::Tensor tile = new_tensor(like, {count, num_rows}, dtype);
  ZOO_LAUNCH(packed_columns, like, w, tile.mutable_data_ptr(), dtype_of(tile, "tile"), row, num_rows, begin, count);
  return tile;
}

// y (M, N) of x (M, K).
void by_tiles(const PackedWeight& w, const at::Tensor& x, const std::optional<at::Tensor>& bias, const at::Tensor& y) {
  const at::ScalarType dtype = tile_dtype(x);
  const at::Tensor from = x.to(dtype), add = bias ? bias->to(dtype) : at::Tensor();
  const int64_t each = tile_of(w.columns);
  for (int64_t row = 0; row < w.rows; row += each) {
    const int64_t num = w.rows - row < each ? w.rows - row : each;
    const at::Tensor tile = columns_of(w, x, dtype, row, num, 0, w.columns), to = y.narrow(1, row, num);
    const at::Tensor found = bias ? at::addmm(add.narrow(0, row, num), from, tile) : at::mm(from, tile);
    to.copy_(found);
  }
}

// y of x in 8 bits.
void by_int8(PackedLinear c, const at::Tensor& x, const at::Tensor& y) {
  const int64_t blocks = c.tokens * Int8Activations::blocks(c.w);
  const KernelScratch<int8_t> codes(x, c.tokens * c.w.columns);
  const KernelScratch<float> scales(x, blocks), group_sums(x, c.w.minima == nullptr ? 0 : c.tokens * c.w.groups());
  const KernelScratch<int32_t> sums(x, blocks);
  const Int8Activations made{codes.data(), scales.data(), sums.data(), group_sums.data()};
  c.x = x.const_data_ptr();
  c.y = y.mutable_data_ptr();
  ZOO_LAUNCH(packed_linear_int8, x, c, made);
}

at::Tensor forward(const at::Tensor& given, const at::Tensor& q, const at::Tensor& scales,
                   const std::optional<at::Tensor>& minima, const std::optional<at::Tensor>& bias, int64_t rows,
                   int64_t bits, int64_t group, bool int8_activations) {
  const at::Device device = zoo::device_of(given);
  check_device(given, "x", device);
  PackedLinear c{};
  c.dtype = dtype_of(given, "x");
  const Matrix m = matrix_of(given, "x");
  c.w = checked(q, scales, minima, rows, m.dim, bits, group, device);
  c.tokens = m.rows;
  if (bias) {
    check_dims(*bias, "bias", 1);
    c.bias_dtype = dtype_of(*bias, "bias");
    check_argument(*bias, "bias", {rows}, bias->scalar_type(), device);
    c.bias = bias->const_data_ptr();
  }
  const at::Tensor x = given.contiguous();
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = rows;
  at::Tensor y = new_tensor(x, shape, x.scalar_type());
  if (y.numel() == 0) return y;
  if (int8_activations) {
    by_int8(c, x, y);
    return y;
  }
  if (c.tokens > most_fused_tokens(c.dtype)) {
    by_tiles(c.w, x.view({m.rows, m.dim}), bias, y.view({m.rows, rows}));
    return y;
  }
  c.x = x.const_data_ptr();
  c.y = y.mutable_data_ptr();
  ZOO_LAUNCH(packed_linear, x, c);
  return y;
}

// dx (..., K) = dy·W.
at::Tensor backward(const at::Tensor& given, const at::Tensor& q, const at::Tensor& scales,
                    const std::optional<at::Tensor>& minima, int64_t columns, int64_t bits, int64_t group) {
  const at::Device device = zoo::device_of(given);
  check_device(given, "grad_y", device);
  dtype_of(given, "grad_y");
  const Matrix m = matrix_of(given, "grad_y");
  const PackedWeight w = checked(q, scales, minima, m.dim, columns, bits, group, device);
  std::vector<int64_t> shape(given.sizes().begin(), given.sizes().end());
  shape.back() = columns;
  const at::Tensor grad_x = new_tensor(given, shape, given.scalar_type());
  if (grad_x.numel() == 0) return grad_x;
  const at::Tensor all = grad_x.view({m.rows, columns});
  if (m.dim == 0) return grad_x.zero_();
  const at::Tensor from = given.reshape({m.rows, m.dim}).to(tile_dtype(given));
  const int64_t each = tile_of(m.dim);
  for (int64_t begin = 0; begin < columns; begin += each) {
    const int64_t count = columns - begin < each ? columns - begin : each;
    const at::Tensor tile = columns_of(w, given, from.scalar_type(), 0, m.dim, begin, count);
    all.narrow(1, begin, count).copy_(at::mm(from, tile.t()));
  }
  return grad_x;
}

}  // namespace

ZOO_OPERATORS(define) {
  define(
      "packed_linear(Tensor x, Tensor q, Tensor scales, Tensor? minima, Tensor? bias, int rows, int bits, "
      "int group_size, bool int8_activations) -> Tensor",
      forward);
  define(
      "packed_linear_backward(Tensor grad_y, Tensor q, Tensor scales, Tensor? minima, int columns, int bits, "
      "int group_size) -> Tensor",
      backward);
}

}  // namespace zoo
