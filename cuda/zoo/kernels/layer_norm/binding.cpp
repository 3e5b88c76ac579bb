// Layer normalisation as operators of torch. The only file of this folder that knows about tensors.
#include <tuple>

#include "../common/arguments.h"
#include "layer_norm_cpu.h"

namespace zoo {
namespace {

at::Tensor new_stats(const at::Tensor& x) {
  return x.new_empty(x.sizes().slice(0, size_t(x.dim() - 1)), x.options().dtype(at::kFloat).requires_grad(false));
}

Matrix check_input(const at::Tensor& x, const char* what) {
  const Matrix m = matrix_of(x, what);
  TORCH_CHECK_VALUE(m.dim >= 1, what, " has shape ", x.sizes(), "; its last dim must be at least 1.");
  dtype_of(x, what);
  check_memory(x, what);
  return m;
}

LayerNorm checked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  LayerNorm c{};
  const Matrix m = check_input(x, "x");
  c.rows = m.rows;
  c.dim = m.dim;
  c.weight_dtype = dtype_of(weight, "weight");
  check_argument(weight, "weight", {m.dim}, weight.scalar_type());
  check_argument(bias, "bias", {m.dim}, weight.scalar_type());
  TORCH_CHECK_VALUE(eps >= 0, "eps is ", eps, "; it must not be negative.");
  c.dtype = dtype_of(x, "x");
  c.inverse_dim = float(1.0 / double(m.dim));
  c.eps = float(eps);
  c.x = x.const_data_ptr();
  c.weight = weight.const_data_ptr();
  c.bias = bias.const_data_ptr();
  return c;
}

struct Results {
  at::Tensor y, mean, rstd;
};

Results run(LayerNorm& c, const at::Tensor& x) {
  Results r{new_like(x), new_stats(x), new_stats(x)};
  c.y = r.y.mutable_data_ptr();
  c.mean = r.mean.mutable_data_ptr<float>();
  c.rstd = r.rstd.mutable_data_ptr<float>();
  layer_norm_cpu(c);
  return r;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& x, const at::Tensor& weight,
                                                          const at::Tensor& bias, double eps) {
  LayerNorm c = checked(x, weight, bias, eps);
  Results r = run(c, x);
  return {r.y, r.mean, r.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  LayerNorm c = checked(x, weight, bias, eps);
  check_argument(residual, "residual", x.sizes(), x.scalar_type());
  at::Tensor sum = new_like(x);
  c.residual = residual.const_data_ptr();
  c.sum = sum.mutable_data_ptr();
  Results r = run(c, x);
  return {r.y, sum, r.mean, r.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad_y, const std::optional<at::Tensor>& grad_sum, const at::Tensor& sum, const at::Tensor& weight,
    const at::Tensor& mean, const at::Tensor& rstd) {
  const Matrix m = check_input(sum, "sum");
  check_argument(grad_y, "grad_y", sum.sizes(), sum.scalar_type());
  if (grad_sum.has_value()) check_argument(*grad_sum, "grad_sum", sum.sizes(), sum.scalar_type());
  const Dtype weight_dtype = dtype_of(weight, "weight");
  check_argument(weight, "weight", {m.dim}, weight.scalar_type());
  const at::IntArrayRef stats = sum.sizes().slice(0, size_t(sum.dim() - 1));
  check_argument(mean, "mean", stats, at::kFloat);
  check_argument(rstd, "rstd", stats, at::kFloat);
  at::Tensor grad_x = new_like(sum), grad_weight = new_like(weight), grad_bias = new_like(weight);
  layer_norm_backward_cpu(LayerNormBackward{
      grad_y.const_data_ptr(), grad_sum.has_value() ? grad_sum->const_data_ptr() : nullptr, sum.const_data_ptr(),
      weight.const_data_ptr(), mean.const_data_ptr<float>(), rstd.const_data_ptr<float>(), grad_x.mutable_data_ptr(),
      grad_weight.mutable_data_ptr(), grad_bias.mutable_data_ptr(), m.rows, m.dim, float(1.0 / double(m.dim)),
      dtype_of(sum, "sum"), weight_dtype});
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)");
  m.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("layer_norm", &layer_norm);
  m.impl("add_layer_norm", &add_layer_norm);
  m.impl("layer_norm_backward", &layer_norm_backward);
}

}  // namespace zoo
