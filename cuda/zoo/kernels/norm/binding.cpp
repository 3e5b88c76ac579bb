// The norm as operators of torch.
#include "binding.h"
#include "norm_cpu.h"

namespace zoo {
namespace {

at::Tensor run(at::TensorList tensors, double factor, bool writes) {
  return scale_norm(tensors, factor, writes, at::kCPU,
                    [](const std::vector<NormRow>& rows, Dtype dtype, float f, double* sums, const at::Tensor&) {
                      scale_norm_cpu(rows.data(), int64_t(rows.size()), dtype, f, sums);
                    });
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
