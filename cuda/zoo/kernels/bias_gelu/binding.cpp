// Bias and GELU as operators of torch.
#include <tuple>

#include "../common/lanes.h"
#include "../common/operators.h"
#include "bias_gelu.h"

namespace zoo {
namespace {

BiasGelu checked(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  const at::Device device = device_of(x);
  const Matrix m = matrix_of(x, "x");
  BiasGelu c{};
  c.dtype = dtype_of(x, "x");
  check_memory(x, "x", device);
  c.bias_dtype = dtype_of(bias, "bias");
  check_argument(bias, "bias", {m.dim}, bias.scalar_type(), device);
  c.x = x.const_data_ptr();
  c.bias = bias.const_data_ptr();
  c.rows = m.rows;
  c.dim = m.dim;
  c.form = tanh ? GELU_TANH : GELU_ERF;
  return c;
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  BiasGelu c = checked(x, bias, tanh);
  at::Tensor y = new_like(x);
  c.out = y.mutable_data_ptr();
  ZOO_LAUNCH(bias_gelu, x, c);
  return y;
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_y, const at::Tensor& x, const at::Tensor& bias,
                                            bool tanh) {
  BiasGelu c = checked(x, bias, tanh);
  check_argument(grad_y, "grad_y", x.sizes(), x.scalar_type(), device_of(x));
  at::Tensor grad_x = new_like(x), grad_bias = new_like(bias);
  c.grad_y = grad_y.const_data_ptr();
  c.out = grad_x.mutable_data_ptr();
  c.grad_bias = grad_bias.mutable_data_ptr();
  const KernelScratch<float> parts(x, num_parts(c.rows) * c.dim);
  ZOO_LAUNCH(bias_gelu_backward, x, c, parts.data());
  return {grad_x, grad_bias};
}

}  // namespace

ZOO_OPERATORS(define) {
  define("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor", forward);
  define("bias_gelu_backward(Tensor grad_y, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)", backward);
}

}  // namespace zoo
