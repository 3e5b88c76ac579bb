// Layer normalisation on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "../common/lanes.h"
#include "binding.h"
#include "layer_norm_cuda.h"

namespace zoo {
namespace {

void forward(const LayerNorm& c, const at::Tensor& x) {
  const CudaCall call(c.residual != nullptr ? "add_layer_norm" : "layer_norm", x);
  call.check(zoo_layer_norm_cuda(&c, call.stream()));
}

void backward(const LayerNormBackward& c, const at::Tensor& sum) {
  const CudaCall call("layer_norm_backward", sum);
  at::Tensor parts = call.scratch(num_parts(c.rows) * 2 * c.dim, at::kFloat);
  call.check(zoo_layer_norm_backward_cuda(&c, parts.mutable_data_ptr<float>(), call.stream()));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_(const at::Tensor& x, const at::Tensor& weight,
                                                           const at::Tensor& bias, double eps) {
  return layer_norm(x, weight, bias, eps, at::kCUDA, forward);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_(
    const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return add_layer_norm(x, residual, weight, bias, eps, at::kCUDA, forward);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_(
    const at::Tensor& grad_y, const std::optional<at::Tensor>& grad_sum, const at::Tensor& sum, const at::Tensor& weight,
    const at::Tensor& mean, const at::Tensor& rstd) {
  return layer_norm_backward(grad_y, grad_sum, sum, weight, mean, rstd, at::kCUDA, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("layer_norm", &layer_norm_);
  m.impl("add_layer_norm", &add_layer_norm_);
  m.impl("layer_norm_backward", &layer_norm_backward_);
}

}  // namespace zoo
