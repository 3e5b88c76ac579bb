// 1-bit compression as operators of torch.
#include "../common/checks.h"
#include "onebit_cpu.h"

namespace zoo {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_group(int64_t group) {
  TORCH_CHECK_VALUE(group >= ONEBIT_GROUP_UNIT && group <= ONEBIT_GROUP_MAX && group % ONEBIT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", ONEBIT_GROUP_UNIT, " from ", ONEBIT_GROUP_UNIT,
                    " to ", ONEBIT_GROUP_MAX, ".");
}

std::tuple<at::Tensor, at::Tensor> compress_(const at::Tensor& x, const at::Tensor& error, int64_t group) {
  check_group(group);
  const int64_t n = x.numel();
  const Dtype dtype = dtype_of(x, "x", 0);
  check_tensor(x, "x", 0, n, dtype);
  check_tensor(error, "error", 0, n, F32);
  at::Tensor bits = x.new_empty({ceil_div(n, 8)}, x.options().dtype(at::kByte).requires_grad(false));
  at::Tensor scales = x.new_empty({ceil_div(n, group)}, x.options().dtype(at::kFloat).requires_grad(false));
  onebit_compress_cpu(x.const_data_ptr(), dtype, static_cast<float*>(writable(error)),
                      bits.mutable_data_ptr<uint8_t>(), scales.mutable_data_ptr<float>(), n, group);
  return {bits, scales};
}

void decompress_(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group, bool add) {
  check_group(group);
  const int64_t n = out.numel();
  const Dtype dtype = dtype_of(out, "out", 0);
  check_tensor(out, "out", 0, n, dtype);
  TORCH_CHECK_VALUE(bits.device().is_cpu() && bits.is_contiguous() && bits.scalar_type() == at::kByte &&
                        bits.numel() == ceil_div(n, 8),
                    "bits is ", bits.scalar_type(), " of shape ", bits.sizes(), " on ", bits.device(), "; for ", n,
                    " elements it must be torch.uint8 of shape [", ceil_div(n, 8), "], contiguous, on the CPU.");
  check_tensor(scales, "scales", 0, ceil_div(n, group), F32);
  onebit_decompress_cpu(writable(out), dtype, bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), add, n,
                        group);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("onebit_compress_(Tensor x, Tensor(a!) error, int group_size) -> (Tensor, Tensor)");
  m.def("onebit_decompress_(Tensor(a!) out, Tensor bits, Tensor scales, int group_size, bool add) -> ()");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("onebit_compress_", &compress_);
  m.impl("onebit_decompress_", &decompress_);
}

}  // namespace zoo
