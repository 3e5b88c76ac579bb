// What the bindings of quantisation on CPUs and on CUDA share: the checks and the results.
#pragma once

#include <tuple>

#include "../common/checks.h"
#include "quantise.h"

namespace zoo {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline void check_options(int64_t bits, int64_t group) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits=", bits, "; it must be 8 or 4.");
  TORCH_CHECK_VALUE(group >= QUANT_GROUP_UNIT && group <= QUANT_GROUP_MAX && group % QUANT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", QUANT_GROUP_UNIT, " from ", QUANT_GROUP_UNIT,
                    " to ", QUANT_GROUP_MAX, ".");
}

// launch(x, dtype, bits, q, scales, n, group, swizzle)
template <class Launch>
std::tuple<at::Tensor, at::Tensor> quantise(const at::Tensor& x, int64_t bits, int64_t group, int64_t nodes,
                                            int64_t local, at::DeviceType kind, const Launch& launch) {
  check_options(bits, group);
  const int64_t n = x.numel(), groups = ceil_div(n, group);
  const Dtype dtype = dtype_of(x, "x", 0);
  check_tensor(x, "x", 0, n, dtype, device_of(x, kind));
  TORCH_CHECK_VALUE(nodes >= 1 && local >= 1 && (nodes * local == 1 || n % (nodes * local * group) == 0),
                    "swizzle=(", nodes, ", ", local, ") cuts ", n, " elements into ", nodes, " x ", local,
                    " pieces; each must be a whole number of groups of ", group, ".");
  at::Tensor q = x.new_empty({ceil_div(n * bits, 8)}, x.options().dtype(at::kChar).requires_grad(false));
  at::Tensor scales = x.new_empty({groups}, x.options().dtype(at::kFloat).requires_grad(false));
  const int64_t piece = groups / (nodes * local);
  launch(x, dtype, int(bits), q.mutable_data_ptr<int8_t>(), scales.mutable_data_ptr<float>(), n, group,
         Swizzle{nodes, local, piece > 0 ? piece : 1});
  return {q, scales};
}

// launch(out, dtype, bits, q, scales, ranks, factor, n, group)
template <class Launch>
void dequantise(const at::Tensor& out, const at::Tensor& q, const at::Tensor& scales, int64_t bits, int64_t group,
                int64_t ranks, double factor, at::DeviceType kind, const Launch& launch) {
  check_options(bits, group);
  const int64_t n = out.numel(), bytes = ceil_div(n * bits, 8), groups = ceil_div(n, group);
  const Dtype dtype = dtype_of(out, "out", 0);
  const at::Device device = device_of(out, kind);
  check_tensor(out, "out", 0, n, dtype, device);
  TORCH_CHECK_VALUE(ranks >= 1, "ranks=", ranks, "; it must be at least 1.");
  TORCH_CHECK_VALUE(q.device() == device && q.is_contiguous() && q.scalar_type() == at::kChar &&
                        q.numel() == ranks * bytes,
                    "q is ", q.scalar_type(), " of shape ", q.sizes(), " on ", q.device(), "; for ", ranks, " x ", n,
                    " elements of ", bits, " bits it must be torch.int8 of ", ranks * bytes,
                    " elements, contiguous, on ", name_of(device), ".");
  check_tensor(scales, "scales", 0, ranks * groups, F32, device);
  launch(out, dtype, int(bits), q.const_data_ptr<int8_t>(), scales.const_data_ptr<float>(), ranks, float(factor), n,
         group);
}

}  // namespace zoo
