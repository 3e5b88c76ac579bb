// Bias, dropout and residual as operators of torch.
#include "binding.h"
#include "bias_dropout_residual_cpu.h"

namespace zoo {
namespace {

void forward(const BiasDropout& c, const at::Tensor&) { bias_dropout_cpu(c); }

void backward(const BiasDropout& c, const at::Tensor&) { bias_dropout_backward_cpu(c); }

at::Tensor bias_dropout_residual_(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p,
                                  int64_t seed, int64_t offset) {
  return bias_dropout_residual(x, bias, residual, p, seed, offset, at::kCPU, forward);
}

std::tuple<at::Tensor, at::Tensor> bias_dropout_residual_backward_(const at::Tensor& grad_out, const at::Tensor& bias,
                                                                   double p, int64_t seed, int64_t offset) {
  return bias_dropout_residual_backward(grad_out, bias, p, seed, offset, at::kCPU, backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("bias_dropout_residual(Tensor x, Tensor bias, Tensor residual, float p, int seed, int offset) -> Tensor");
  m.def(
      "bias_dropout_residual_backward(Tensor grad_out, Tensor bias, float p, int seed, int offset) -> "
      "(Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("bias_dropout_residual", &bias_dropout_residual_);
  m.impl("bias_dropout_residual_backward", &bias_dropout_residual_backward_);
}

}  // namespace zoo
