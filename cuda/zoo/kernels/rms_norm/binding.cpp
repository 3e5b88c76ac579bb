// Root mean square normalisation as operators of torch.
#include <tuple>

#include "../common/operators.h"
#include "rms_norm.h"

namespace zoo {
namespace {

RmsNorm checked(const at::Tensor& x, const at::Tensor& weight, double eps, bool plus_one, const at::Device& device) {
  RmsNorm c{};
  const Matrix m = matrix_of(x, "x");
  TORCH_CHECK_VALUE(m.dim >= 1, "x has shape ", x.sizes(), "; its last dim must be at least 1.");
  c.dtype = dtype_of(x, "x");
  check_memory(x, "x", device);
  c.rows = m.rows;
  c.dim = m.dim;
  c.weight_dtype = dtype_of(weight, "weight");
  check_argument(weight, "weight", {m.dim}, weight.scalar_type(), device);
  TORCH_CHECK_VALUE(eps >= 0, "eps is ", eps, "; it must not be negative.");
  c.inverse_dim = float(1.0 / double(m.dim));
  c.eps = float(eps);
  c.plus_one = plus_one;
  c.x = x.const_data_ptr();
  c.weight = weight.const_data_ptr();
  return c;
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight, double eps, bool plus_one) {
  RmsNorm c = checked(x, weight, eps, plus_one, device_of(x));
  at::Tensor y = new_like(x);
  c.y = y.mutable_data_ptr();
  ZOO_LAUNCH(rms_norm, x, c);
  return y;
}

std::tuple<at::Tensor, at::Tensor> forward_of_sum(const at::Tensor& x, const at::Tensor& residual,
                                                  const at::Tensor& weight, double eps, bool plus_one) {
  const at::Device device = device_of(x);
  RmsNorm c = checked(x, weight, eps, plus_one, device);
  check_argument(residual, "residual", x.sizes(), x.scalar_type(), device);
  at::Tensor y = new_like(x), sum = new_like(x);
  c.residual = residual.const_data_ptr();
  c.y = y.mutable_data_ptr();
  c.sum = sum.mutable_data_ptr();
  ZOO_LAUNCH(rms_norm, x, c);
  return {y, sum};
}

}  // namespace

ZOO_OPERATORS(define) {
  define("rms_norm(Tensor x, Tensor weight, float eps, bool plus_one) -> Tensor", forward);
  define(
      "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool plus_one) -> "
      "(Tensor, Tensor)",
      forward_of_sum);
}

}  // namespace zoo
