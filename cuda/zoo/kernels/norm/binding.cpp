// The norm as operators of torch.
#include <vector>

#include "../common/checks.h"
#include "norm_cpu.h"

namespace zoo {
namespace {

at::Tensor run(at::TensorList tensors, double factor, bool writes) {
  const Dtype dtype = dtype_of(tensors[0], "tensors", 0);
  std::vector<NormRow> rows;
  rows.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    check_tensor(t, "tensors", int64_t(i), t.numel(), dtype);
    rows.push_back({writes ? writable(t) : const_cast<void*>(t.const_data_ptr()), t.numel()});
  }
  at::Tensor sums =
      tensors[0].new_empty({int64_t(rows.size())}, tensors[0].options().dtype(at::kDouble).requires_grad(false));
  scale_norm_cpu(rows.data(), int64_t(rows.size()), dtype, float(factor), sums.mutable_data_ptr<double>());
  return sums;
}

at::Tensor sum_squares(at::TensorList tensors) { return run(tensors, 1.0, false); }

at::Tensor scale_sum_squares_(at::TensorList tensors, double factor) { return run(tensors, factor, true); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("sum_squares(Tensor[] tensors) -> Tensor");
  m.def("scale_sum_squares_(Tensor(a!)[] tensors, float factor) -> Tensor");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("sum_squares", &sum_squares);
  m.impl("scale_sum_squares_", &scale_sum_squares_);
}

}  // namespace zoo
