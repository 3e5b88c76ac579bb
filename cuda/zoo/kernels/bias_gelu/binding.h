// What the bindings of bias and GELU on CPUs and on CUDA share: the checks and the results.
#pragma once

#include <tuple>

#include "../common/arguments.h"
#include "bias_gelu.h"

namespace zoo {

inline BiasGelu checked(const at::Tensor& x, const at::Tensor& bias, bool tanh, const at::Device& device) {
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

// launch(c, x)
template <class Launch>
at::Tensor bias_gelu(const at::Tensor& x, const at::Tensor& bias, bool tanh, at::DeviceType kind, const Launch& launch) {
  BiasGelu c = checked(x, bias, tanh, device_of(x, kind));
  at::Tensor y = new_like(x);
  c.out = y.mutable_data_ptr();
  launch(c, x);
  return y;
}

// launch(c, x)
template <class Launch>
std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& grad_y, const at::Tensor& x,
                                                      const at::Tensor& bias, bool tanh, at::DeviceType kind,
                                                      const Launch& launch) {
  const at::Device device = device_of(x, kind);
  BiasGelu c = checked(x, bias, tanh, device);
  check_argument(grad_y, "grad_y", x.sizes(), x.scalar_type(), device);
  at::Tensor grad_x = new_like(x), grad_bias = new_like(bias);
  c.grad_y = grad_y.const_data_ptr();
  c.out = grad_x.mutable_data_ptr();
  c.grad_bias = grad_bias.mutable_data_ptr();
  launch(c, x);
  return {grad_x, grad_bias};
}

}  // namespace zoo
