// Bias and GELU as operators of torch.
#include "binding.h"
#include "bias_gelu_cpu.h"

namespace zoo {
namespace {

void forward(const BiasGelu& c, const at::Tensor&) { bias_gelu_cpu(c); }

void backward(const BiasGelu& c, const at::Tensor&) { bias_gelu_backward_cpu(c); }

at::Tensor bias_gelu_(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  return bias_gelu(x, bias, tanh, at::kCPU, forward);
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward_(const at::Tensor& grad_y, const at::Tensor& x,
                                                       const at::Tensor& bias, bool tanh) {
  return bias_gelu_backward(grad_y, x, bias, tanh, at::kCPU, backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad_y, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("bias_gelu", &bias_gelu_);
  m.impl("bias_gelu_backward", &bias_gelu_backward_);
}

}  // namespace zoo
