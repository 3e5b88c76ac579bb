// Bias, dropout and residual on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "../common/lanes.h"
#include "bias_dropout_residual_cuda.h"
#include "binding.h"

namespace zoo {
namespace {

void forward(const BiasDropout& c, const at::Tensor& x) {
  const CudaCall call("bias_dropout_residual", x);
  call.check(zoo_bias_dropout_residual_cuda(&c, call.stream()));
}

void backward(const BiasDropout& c, const at::Tensor& grad_out) {
  const CudaCall call("bias_dropout_residual_backward", grad_out);
  at::Tensor parts = call.scratch(num_parts(c.rows) * c.dim, at::kFloat);
  call.check(zoo_bias_dropout_residual_backward_cuda(&c, parts.mutable_data_ptr<float>(), call.stream()));
}

at::Tensor bias_dropout_residual_(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p,
                                  int64_t seed, int64_t offset) {
  return bias_dropout_residual(x, bias, residual, p, seed, offset, at::kCUDA, forward);
}

std::tuple<at::Tensor, at::Tensor> bias_dropout_residual_backward_(const at::Tensor& grad_out, const at::Tensor& bias,
                                                                   double p, int64_t seed, int64_t offset) {
  return bias_dropout_residual_backward(grad_out, bias, p, seed, offset, at::kCUDA, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("bias_dropout_residual", &bias_dropout_residual_);
  m.impl("bias_dropout_residual_backward", &bias_dropout_residual_backward_);
}

}  // namespace zoo
