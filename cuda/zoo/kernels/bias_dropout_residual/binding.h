// What the bindings of bias, dropout and residual on CPUs and on CUDA share: the checks and the results.
#pragma once

#include <cmath>
#include <tuple>

#include "../common/arguments.h"
#include "bias_dropout_residual.h"

namespace zoo {

inline BiasDropout checked(const at::Tensor& x, const char* what, const at::Tensor& bias, double p, int64_t seed,
                           int64_t offset, const at::Device& device) {
  const Matrix m = matrix_of(x, what);
  BiasDropout c{};
  c.dtype = dtype_of(x, what);
  check_memory(x, what, device);
  c.bias_dtype = dtype_of(bias, "bias");
  check_argument(bias, "bias", {m.dim}, bias.scalar_type(), device);
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "p is ", p, "; it must be between 0 and 1.");
  c.x = x.const_data_ptr();
  c.bias = bias.const_data_ptr();
  c.rows = m.rows;
  c.dim = m.dim;
  c.generator = {uint64_t(seed), uint64_t(offset)};
  const double threshold = std::ceil(p * 4294967296.0);
  const bool all = threshold == 4294967296.0;
  c.threshold = all ? 0xFFFFFFFFu : uint32_t(threshold);
  c.scale = all ? 0.0f : float(1.0 / (1.0 - p));
  return c;
}

// launch(c, x)
template <class Launch>
at::Tensor bias_dropout_residual(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p,
                                 int64_t seed, int64_t offset, at::DeviceType kind, const Launch& launch) {
  const at::Device device = device_of(x, kind);
  BiasDropout c = checked(x, "x", bias, p, seed, offset, device);
  check_argument(residual, "residual", x.sizes(), x.scalar_type(), device);
  c.residual = residual.const_data_ptr();
  at::Tensor out = new_like(x);
  c.out = out.mutable_data_ptr();
  launch(c, x);
  return out;
}

// launch(c, grad_out)
template <class Launch>
std::tuple<at::Tensor, at::Tensor> bias_dropout_residual_backward(const at::Tensor& grad_out, const at::Tensor& bias,
                                                                  double p, int64_t seed, int64_t offset,
                                                                  at::DeviceType kind, const Launch& launch) {
  BiasDropout c = checked(grad_out, "grad_out", bias, p, seed, offset, device_of(grad_out, kind));
  at::Tensor grad_x = new_like(grad_out), grad_bias = new_like(bias);
  c.out = grad_x.mutable_data_ptr();
  c.grad_bias = grad_bias.mutable_data_ptr();
  launch(c, grad_out);
  return {grad_x, grad_bias};
}

}  // namespace zoo
