// Bias and GELU on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "../common/lanes.h"
#include "bias_gelu_cuda.h"
#include "binding.h"

namespace zoo {
namespace {

void forward(const BiasGelu& c, const at::Tensor& x) {
  const CudaCall call("bias_gelu", x);
  call.check(zoo_bias_gelu_cuda(&c, call.stream()));
}

void backward(const BiasGelu& c, const at::Tensor& x) {
  const CudaCall call("bias_gelu_backward", x);
  at::Tensor parts = call.scratch(num_parts(c.rows) * c.dim, at::kFloat);
  call.check(zoo_bias_gelu_backward_cuda(&c, parts.mutable_data_ptr<float>(), call.stream()));
}

at::Tensor bias_gelu_(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  return bias_gelu(x, bias, tanh, at::kCUDA, forward);
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward_(const at::Tensor& grad_y, const at::Tensor& x,
                                                       const at::Tensor& bias, bool tanh) {
  return bias_gelu_backward(grad_y, x, bias, tanh, at::kCUDA, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("bias_gelu", &bias_gelu_);
  m.impl("bias_gelu_backward", &bias_gelu_backward_);
}

}  // namespace zoo
