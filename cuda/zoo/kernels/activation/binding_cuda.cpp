// Activations on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "activation_cuda.h"
#include "binding.h"

namespace zoo {
namespace {

void forward(const Activation& c, const at::Tensor& a) {
  const CudaCall call("activate_", a);
  call.check(zoo_activation_cuda(&c, call.stream()));
}

void backward(const Activation& c, const at::Tensor& a) {
  const CudaCall call("activate_backward_", a);
  call.check(zoo_activation_backward_cuda(&c, call.stream()));
}

void activate_(const at::Tensor& a, const at::Tensor& pre, c10::string_view activation, bool gated) {
  activate(a, pre, activation, gated, at::kCUDA, forward);
}

void activate_backward_(const at::Tensor& a, const at::Tensor& grad_pre, const at::Tensor& grad_a, const at::Tensor& pre,
                        c10::string_view activation, bool gated) {
  activate_backward(a, grad_pre, grad_a, pre, activation, gated, at::kCUDA, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("activate_", &activate_);
  m.impl("activate_backward_", &activate_backward_);
}

}  // namespace zoo
