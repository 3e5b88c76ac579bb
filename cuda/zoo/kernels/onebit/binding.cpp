// 1-bit compression as operators of torch.
#include <tuple>

#include "../common/operators.h"
#include "onebit.h"

namespace zoo {
namespace {

void check_group(int64_t group) {
  TORCH_CHECK_VALUE(group >= ONEBIT_GROUP_UNIT && group <= ONEBIT_GROUP_MAX && group % ONEBIT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", ONEBIT_GROUP_UNIT, " from ", ONEBIT_GROUP_UNIT,
                    " to ", ONEBIT_GROUP_MAX, ".");
}

std::tuple<at::Tensor, at::Tensor> compress(const at::Tensor& x, const std::optional<at::Tensor>& error,
                                            int64_t group) {
  check_group(group);
  const int64_t n = x.numel();
  const Dtype dtype = dtype_of(x, "x");
  const at::Device device = device_of(x);
  check_memory(x, "x", device);
  if (error) {
    check_flat(x, "x", n, at::kFloat, device);  // c takes its place
    check_flat(*error, "error", n, at::kFloat, device);
  }
  at::Tensor bits = new_tensor(x, {ceil_div(n, 8)}, at::kByte),
             scales = new_tensor(x, {ceil_div(n, group)}, at::kFloat);
  const float* e = error ? error->const_data_ptr<float>() : nullptr;
  ZOO_LAUNCH(onebit_compress, x, writable(x), dtype, e, bits.mutable_data_ptr<uint8_t>(),
             scales.mutable_data_ptr<float>(), n, group);
  return {bits, scales};
}

void owed(const at::Tensor& error, const at::Tensor& c, const at::Tensor& bits, const at::Tensor& scales,
          int64_t group) {
  check_group(group);
  const int64_t n = error.numel();
  const at::Device device = device_of(error);
  check_flat(error, "error", n, at::kFloat, device);
  check_flat(c, "c", n, at::kFloat, device);
  check_flat(bits, "bits", ceil_div(n, 8), at::kByte, device);
  check_flat(scales, "scales", ceil_div(n, group), at::kFloat, device);
  ZOO_LAUNCH(onebit_owed, error, static_cast<float*>(writable(error)), c.const_data_ptr<float>(),
             bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), n, group);
}

void decompress(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group, bool add) {
  check_group(group);
  const int64_t n = out.numel();
  const Dtype dtype = dtype_of(out, "out");
  const at::Device device = device_of(out);
  check_memory(out, "out", device);
  check_flat(bits, "bits", ceil_div(n, 8), at::kByte, device);
  check_flat(scales, "scales", ceil_div(n, group), at::kFloat, device);
  ZOO_LAUNCH(onebit_decompress, out, writable(out), dtype, bits.const_data_ptr<uint8_t>(),
             scales.const_data_ptr<float>(), add, n, group);
}

}  // namespace

ZOO_OPERATORS(define) {
  define("onebit_compress_(Tensor(a!) x, Tensor? error, int group_size) -> (Tensor, Tensor)", compress);
  define("onebit_owed_(Tensor(a!) error, Tensor c, Tensor bits, Tensor scales, int group_size) -> ()", owed);
  define("onebit_decompress_(Tensor(a!) out, Tensor bits, Tensor scales, int group_size, bool add) -> ()", decompress);
}

}  // namespace zoo
