// Layer normalisation as operators of torch.
#include <tuple>

#include "../common/lanes.h"
#include "../common/operators.h"
#include "layer_norm.h"

namespace zoo {
namespace {

at::Tensor new_stats(const at::Tensor& x) { return new_tensor(x, x.sizes().slice(0, size_t(x.dim() - 1)), at::kFloat); }

Matrix check_rows(const at::Tensor& x, const char* what, const at::Device& device) {
  const Matrix m = matrix_of(x, what);
  TORCH_CHECK_VALUE(m.dim >= 1, what, " has shape ", x.sizes(), "; its last dim must be at least 1.");
  dtype_of(x, what);
  check_memory(x, what, device);
  return m;
}

LayerNorm checked(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                  const at::Device& device) {
  LayerNorm c{};
  const Matrix m = check_rows(x, "x", device);
  c.rows = m.rows;
  c.dim = m.dim;
  c.weight_dtype = dtype_of(weight, "weight");
  check_argument(weight, "weight", {m.dim}, weight.scalar_type(), device);
  check_argument(bias, "bias", {m.dim}, weight.scalar_type(), device);
  TORCH_CHECK_VALUE(eps >= 0, "eps is ", eps, "; it must not be negative.");
  c.dtype = dtype_of(x, "x");
  c.inverse_dim = float(1.0 / double(m.dim));
  c.eps = float(eps);
  c.x = x.const_data_ptr();
  c.weight = weight.const_data_ptr();
  c.bias = bias.const_data_ptr();
  return c;
}

struct LayerNormResults {
  at::Tensor y, mean, rstd;
};

LayerNormResults normalise(LayerNorm& c, const at::Tensor& x) {
  LayerNormResults r{new_like(x), new_stats(x), new_stats(x)};
  c.y = r.y.mutable_data_ptr();
  c.mean = r.mean.mutable_data_ptr<float>();
  c.rstd = r.rstd.mutable_data_ptr<float>();
  ZOO_LAUNCH(layer_norm, x, c);
  return r;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& weight,
                                                       const at::Tensor& bias, double eps) {
  LayerNorm c = checked(x, weight, bias, eps, device_of(x));
  LayerNormResults r = normalise(c, x);
  return {r.y, r.mean, r.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward_of_sum(const at::Tensor& x,
                                                                          const at::Tensor& residual,
                                                                          const at::Tensor& weight,
                                                                          const at::Tensor& bias, double eps) {
  const at::Device device = device_of(x);
  LayerNorm c = checked(x, weight, bias, eps, device);
  check_argument(residual, "residual", x.sizes(), x.scalar_type(), device);
  at::Tensor sum = new_like(x);
  c.residual = residual.const_data_ptr();
  c.sum = sum.mutable_data_ptr();
  LayerNormResults r = normalise(c, x);
  return {r.y, sum, r.mean, r.rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_y,
                                                        const std::optional<at::Tensor>& grad_sum,
                                                        const at::Tensor& sum, const at::Tensor& weight,
                                                        const at::Tensor& mean, const at::Tensor& rstd) {
  const at::Device device = device_of(sum);
  const Matrix m = check_rows(sum, "sum", device);
  check_argument(grad_y, "grad_y", sum.sizes(), sum.scalar_type(), device);
  if (grad_sum.has_value()) check_argument(*grad_sum, "grad_sum", sum.sizes(), sum.scalar_type(), device);
  const Dtype weight_dtype = dtype_of(weight, "weight");
  check_argument(weight, "weight", {m.dim}, weight.scalar_type(), device);
  const at::IntArrayRef stats = sum.sizes().slice(0, size_t(sum.dim() - 1));
  check_argument(mean, "mean", stats, at::kFloat, device);
  check_argument(rstd, "rstd", stats, at::kFloat, device);
  at::Tensor grad_x = new_like(sum), grad_weight = new_like(weight), grad_bias = new_like(weight);
  const LayerNormBackward c{grad_y.const_data_ptr(),
                            grad_sum.has_value() ? grad_sum->const_data_ptr() : nullptr,
                            sum.const_data_ptr(),
                            weight.const_data_ptr(),
                            mean.const_data_ptr<float>(),
                            rstd.const_data_ptr<float>(),
                            grad_x.mutable_data_ptr(),
                            grad_weight.mutable_data_ptr(),
                            grad_bias.mutable_data_ptr(),
                            m.rows,
                            m.dim,
                            float(1.0 / double(m.dim)),
                            dtype_of(sum, "sum"),
                            weight_dtype};
  const KernelScratch<float> parts(sum, num_parts(m.rows) * parts_width(m.dim));
  ZOO_LAUNCH(layer_norm_backward, sum, c, parts.data());
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

ZOO_OPERATORS(define) {
  define("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)", forward);
  define(
      "add_layer_norm(Tensor x, Tensor residual, Tensor weight, Tensor bias, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      forward_of_sum);
  define(
      "layer_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)",
      backward);
}

}  // namespace zoo
