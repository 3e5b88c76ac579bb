// Bias, dropout and residual as operators of torch.
#include <cmath>
#include <tuple>

#include "../common/lanes.h"
#include "../common/operators.h"
#include "bias_dropout_residual.h"

namespace zoo {
namespace {

BiasDropout without_bias(const at::Tensor& x, const char* what, double p, int64_t seed, int64_t offset) {
  const at::Device device = device_of(x);
  const Matrix m = matrix_of(x, what);
  BiasDropout c{};
  c.dtype = dtype_of(x, what);
  check_memory(x, what, device);
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "p is ", p, "; it must be between 0 and 1.");
  c.x = x.const_data_ptr();
  c.rows = m.rows;
  c.dim = m.dim;
  c.generator = {uint64_t(seed), uint64_t(offset)};
  const double threshold = std::ceil(p * 4294967296.0);
  const bool all = threshold == 4294967296.0;
  c.threshold = all ? 0xFFFFFFFFu : uint32_t(threshold);
  c.scale = all ? 0.0f : float(1.0 / (1.0 - p));
  return c;
}

BiasDropout checked(const at::Tensor& x, const char* what, const at::Tensor& bias, double p, int64_t seed,
                    int64_t offset) {
  BiasDropout c = without_bias(x, what, p, seed, offset);
  c.bias_dtype = dtype_of(bias, "bias");
  check_argument(bias, "bias", {c.dim}, bias.scalar_type(), device_of(x));
  c.bias = bias.const_data_ptr();
  return c;
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& residual, double p, int64_t seed,
                   int64_t offset) {
  BiasDropout c = checked(x, "x", bias, p, seed, offset);
  check_argument(residual, "residual", x.sizes(), x.scalar_type(), device_of(x));
  c.residual = residual.const_data_ptr();
  at::Tensor out = new_like(x);
  c.out = out.mutable_data_ptr();
  ZOO_LAUNCH(bias_dropout_residual, x, c);
  return out;
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad_out, const at::Tensor& bias, double p, int64_t seed,
                                            int64_t offset) {
  BiasDropout c = checked(grad_out, "grad_out", bias, p, seed, offset);
  at::Tensor grad_x = new_like(grad_out), grad_bias = new_like(bias);
  c.out = grad_x.mutable_data_ptr();
  c.grad_bias = grad_bias.mutable_data_ptr();
  const KernelScratch<float> parts(grad_out, num_parts(c.rows) * c.dim);
  ZOO_LAUNCH(bias_dropout_residual_backward, grad_out, c, parts.data());
  return {grad_x, grad_bias};
}

at::Tensor alone(const at::Tensor& x, double p, int64_t seed, int64_t offset, int64_t first) {
  BiasDropout c = without_bias(x, "x", p, seed, offset);
  TORCH_CHECK_VALUE(first >= 0, "first is ", first, "; it must not be negative.");
  c.first = first;
  at::Tensor out = new_like(x);
  c.out = out.mutable_data_ptr();
  ZOO_LAUNCH(dropout, x, c);
  return out;
}

}  // namespace

ZOO_OPERATORS(define) {
  define("bias_dropout_residual(Tensor x, Tensor bias, Tensor residual, float p, int seed, int offset) -> Tensor",
         forward);
  define(
      "bias_dropout_residual_backward(Tensor grad_out, Tensor bias, float p, int seed, int offset) -> "
      "(Tensor, Tensor)",
      backward);
  define("dropout(Tensor x, float p, int seed, int offset, int first) -> Tensor", alone);
}

}  // namespace zoo
