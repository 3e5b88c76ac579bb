// Softmax as operators of torch.
#include "binding.h"
#include "softmax_cpu.h"

namespace zoo {
namespace {

void forward(const Softmax& c, const at::Tensor&) { softmax_cpu(c); }

void backward(const SoftmaxBackward& c, const at::Tensor&) { softmax_backward_cpu(c); }

at::Tensor softmax_(const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool causal) {
  return softmax(x, mask, scale, causal, at::kCPU, forward);
}

at::Tensor softmax_backward_(const at::Tensor& grad_y, const at::Tensor& y, double scale) {
  return softmax_backward(grad_y, y, scale, at::kCPU, backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor");
  m.def("softmax_backward(Tensor grad_y, Tensor y, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("softmax", &softmax_);
  m.impl("softmax_backward", &softmax_backward_);
}

}  // namespace zoo
