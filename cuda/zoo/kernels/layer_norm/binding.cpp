// Layer normalisation as operators of torch.
#include "binding.h"
#include "layer_norm_cpu.h"

namespace zoo {
namespace {

void forward(const LayerNorm& c, const at::Tensor&) { layer_norm_cpu(c); }

void backward(const LayerNormBackward& c, const at::Tensor&) { layer_norm_backward_cpu(c); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_(const at::Tensor& x, const at::Tensor& weight,
                                                           const at::Tensor& bias, double eps) {
  return layer_norm(x, weight, bias, eps, at::kCPU, forward);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm_(
    const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return add_layer_norm(x, residual, weight, bias, eps, at::kCPU, forward);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward_(
    const at::Tensor& grad_y, const std::optional<at::Tensor>& grad_sum, const at::Tensor& sum, const at::Tensor& weight,
    const at::Tensor& mean, const at::Tensor& rstd) {
  return layer_norm_backward(grad_y, grad_sum, sum, weight, mean, rstd, at::kCPU, backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("layer_norm", &layer_norm_);
  m.impl("add_layer_norm", &add_layer_norm_);
  m.impl("layer_norm_backward", &layer_norm_backward_);
}

}  // namespace zoo
