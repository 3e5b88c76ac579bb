// The norm as operators of torch.
#include <vector>

#include "../common/operators.h"
#include "../common/squares.h"
#include "norm.h"

namespace zoo {
namespace {

at::Tensor run(at::TensorList tensors, double factor, bool writes) {
  const at::Tensor& first = head_of(tensors, "tensors");
  const Dtype dtype = dtype_of(first, {"tensors", 0});
  const at::Device device = device_of(first);
  std::vector<NormRow> rows;
  rows.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& t = tensors[i];
    check_tensor(t, {"tensors", int64_t(i)}, t.numel(), dtype, device);
    rows.push_back({writes ? writable(t) : const_cast<void*>(t.const_data_ptr()), t.numel()});
  }
  const int64_t count = int64_t(rows.size());
  at::Tensor sums = new_tensor(first, {count}, at::kDouble);
  const KernelScratch<double> parts(first, square_parts(rows.data(), count));
  ZOO_LAUNCH(scale_norm, first, rows.data(), count, dtype, float(factor), parts.data(),
             sums.mutable_data_ptr<double>());
  return sums;
}

at::Tensor sum_squares(at::TensorList tensors) { return run(tensors, 1.0, false); }

at::Tensor scale_sum_squares(at::TensorList tensors, double factor) { return run(tensors, factor, true); }

}  // namespace

ZOO_OPERATORS(define) {
  define("sum_squares(Tensor[] tensors) -> Tensor", sum_squares);
  define("scale_sum_squares_(Tensor(a!)[] tensors, float factor) -> Tensor", scale_sum_squares);
}

}  // namespace zoo
