// Bias and GELU as operators of torch. The only file of this folder that knows about tensors.
#include <tuple>

#include "../common/arguments.h"
#include "bias_gelu_cpu.h"

namespace zoo {
namespace {

BiasGelu checked(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  const Matrix m = matrix_of(x, "x");
  BiasGelu c{};
  c.dtype = dtype_of(x, "x");
  check_memory(x, "x");
  c.bias_dtype = dtype_of(bias, "bias");
  check_argument(bias, "bias", {m.dim}, bias.scalar_type());
  c.x = x.const_data_ptr();
  c.bias = bias.const_data_ptr();
  c.rows = m.rows;
  c.dim = m.dim;
  c.form = tanh ? GELU_TANH : GELU_ERF;
  return c;
}

at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias, bool tanh) {
  BiasGelu c = checked(x, bias, tanh);
  at::Tensor y = new_like(x);
  c.out = y.mutable_data_ptr();
  bias_gelu_cpu(c);
  return y;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                      const at::Tensor& bias, bool tanh) {
  BiasGelu c = checked(x, bias, tanh);
  check_argument(grad_y, "grad_y", x.sizes(), x.scalar_type());
  at::Tensor grad_x = new_like(x), grad_bias = new_like(bias);
  c.grad_y = grad_y.const_data_ptr();
  c.out = grad_x.mutable_data_ptr();
  c.grad_bias = grad_bias.mutable_data_ptr();
  bias_gelu_backward_cpu(c);
  return {grad_x, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad_y, Tensor x, Tensor bias, bool tanh) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("bias_gelu", &bias_gelu);
  m.impl("bias_gelu_backward", &bias_gelu_backward);
}

}  // namespace zoo
