// The norm on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "binding.h"
#include "norm_cuda.h"

namespace zoo {
namespace {

at::Tensor run(const char* op, at::TensorList tensors, double factor, bool writes) {
  return scale_norm(tensors, factor, writes, at::kCUDA,
                    [op](const std::vector<NormRow>& rows, Dtype dtype, float f, double* sums, const at::Tensor& first) {
                      const CudaCall call(op, first);
                      const int64_t count = int64_t(rows.size());
                      at::Tensor parts = call.scratch(norm_parts(rows.data(), count), at::kDouble);
                      call.check(zoo_scale_norm_cuda(rows.data(), count, dtype, f, parts.mutable_data_ptr<double>(), sums,
                                                     call.stream()));
                    });
}

at::Tensor sum_squares(at::TensorList tensors) { return run("sum_squares", tensors, 1.0, false); }

at::Tensor scale_sum_squares_(at::TensorList tensors, double factor) {
  return run("scale_sum_squares_", tensors, factor, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("sum_squares", &sum_squares);
  m.impl("scale_sum_squares_", &scale_sum_squares_);
}

}  // namespace zoo
