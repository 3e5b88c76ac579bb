// What the bindings of the norm on CPUs and on CUDA share: the checks and the result.
#pragma once

#include <vector>

#include "../common/checks.h"
#include "norm.h"

namespace zoo {

// launch(rows, dtype, factor, sums, tensors[0])
template <class Launch>
at::Tensor scale_norm(at::TensorList tensors, double factor, bool writes, at::DeviceType kind, const Launch& launch) {
  const Dtype dtype = dtype_of(tensors[0], "tensors", 0);
  const at::Device device = device_of(tensors[0], kind);
  std::vector<NormRow> rows;
  rows.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    check_tensor(t, "tensors", int64_t(i), t.numel(), dtype, device);
    rows.push_back({writes ? writable(t) : const_cast<void*>(t.const_data_ptr()), t.numel()});
  }
  at::Tensor sums =
      tensors[0].new_empty({int64_t(rows.size())}, tensors[0].options().dtype(at::kDouble).requires_grad(false));
  launch(rows, dtype, float(factor), sums.mutable_data_ptr<double>(), tensors[0]);
  return sums;
}

}  // namespace zoo
