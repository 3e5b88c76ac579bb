// Activations as operators of torch.
#include "binding.h"
#include "activation_cpu.h"

namespace zoo {
namespace {

void forward(const Activation& c, const at::Tensor&) { activation_cpu(c); }

void backward(const Activation& c, const at::Tensor&) { activation_backward_cpu(c); }

void activate_(const at::Tensor& a, const at::Tensor& pre, c10::string_view activation, bool gated) {
  activate(a, pre, activation, gated, at::kCPU, forward);
}

void activate_backward_(const at::Tensor& a, const at::Tensor& grad_pre, const at::Tensor& grad_a, const at::Tensor& pre,
                        c10::string_view activation, bool gated) {
  activate_backward(a, grad_pre, grad_a, pre, activation, gated, at::kCPU, backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("activate_(Tensor(a!) a, Tensor pre, str activation, bool gated) -> ()");
  m.def(
      "activate_backward_(Tensor(a!) a, Tensor(b!) grad_pre, Tensor grad_a, Tensor pre, str activation, bool gated) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("activate_", &activate_);
  m.impl("activate_backward_", &activate_backward_);
}

}  // namespace zoo
