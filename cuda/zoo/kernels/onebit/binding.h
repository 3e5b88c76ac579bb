// What the bindings of 1-bit compression on CPUs and on CUDA share: the checks and the results.
#pragma once

#include <tuple>

#include "../common/checks.h"
#include "onebit.h"

namespace zoo {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void check_group(int64_t group) {
  TORCH_CHECK_VALUE(group >= ONEBIT_GROUP_UNIT && group <= ONEBIT_GROUP_MAX && group % ONEBIT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", ONEBIT_GROUP_UNIT, " from ", ONEBIT_GROUP_UNIT,
                    " to ", ONEBIT_GROUP_MAX, ".");
}

// launch(x, dtype, error, bits, scales, n, group)
template <class Launch>
std::tuple<at::Tensor, at::Tensor> onebit_compress(const at::Tensor& x, const at::Tensor& error, int64_t group,
                                                   at::DeviceType kind, const Launch& launch) {
  check_group(group);
  const int64_t n = x.numel();
  const Dtype dtype = dtype_of(x, "x", 0);
  const at::Device device = device_of(x, kind);
  check_tensor(x, "x", 0, n, dtype, device);
  check_tensor(error, "error", 0, n, F32, device);
  at::Tensor bits = x.new_empty({ceil_div(n, 8)}, x.options().dtype(at::kByte).requires_grad(false));
  at::Tensor scales = x.new_empty({ceil_div(n, group)}, x.options().dtype(at::kFloat).requires_grad(false));
  launch(x, dtype, static_cast<float*>(writable(error)), bits.mutable_data_ptr<uint8_t>(),
         scales.mutable_data_ptr<float>(), n, group);
  return {bits, scales};
}

// launch(out, dtype, bits, scales, n)
template <class Launch>
void onebit_decompress(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group,
                       at::DeviceType kind, const Launch& launch) {
  check_group(group);
  const int64_t n = out.numel();
  const Dtype dtype = dtype_of(out, "out", 0);
  const at::Device device = device_of(out, kind);
  check_tensor(out, "out", 0, n, dtype, device);
  TORCH_CHECK_VALUE(bits.device() == device && bits.is_contiguous() && bits.scalar_type() == at::kByte &&
                        bits.numel() == ceil_div(n, 8),
                    "bits is ", bits.scalar_type(), " of shape ", bits.sizes(), " on ", bits.device(), "; for ", n,
                    " elements it must be torch.uint8 of shape [", ceil_div(n, 8), "], contiguous, on ",
                    name_of(device), ".");
  check_tensor(scales, "scales", 0, ceil_div(n, group), F32, device);
  launch(out, dtype, bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), n);
}

}  // namespace zoo
