// Softmax on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "binding.h"
#include "softmax_cuda.h"

namespace zoo {
namespace {

void forward(const Softmax& c, const at::Tensor& x) {
  const CudaCall call("softmax", x);
  call.check(zoo_softmax_cuda(&c, call.stream()));
}

void backward(const SoftmaxBackward& c, const at::Tensor& y) {
  const CudaCall call("softmax_backward", y);
  call.check(zoo_softmax_backward_cuda(&c, call.stream()));
}

at::Tensor softmax_(const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool causal) {
  return softmax(x, mask, scale, causal, at::kCUDA, forward);
}

at::Tensor softmax_backward_(const at::Tensor& grad_y, const at::Tensor& y, double scale) {
  return softmax_backward(grad_y, y, scale, at::kCUDA, backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("softmax", &softmax_);
  m.impl("softmax_backward", &softmax_backward_);
}

}  // namespace zoo
