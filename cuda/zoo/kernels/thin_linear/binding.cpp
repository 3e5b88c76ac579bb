// Batch-invariant linear layers as an operator of torch.
#include <vector>

#include "../common/operators.h"
#include "thin_linear.h"

namespace zoo {
namespace {

at::Tensor forward(const at::Tensor& given, at::TensorList weights, at::TensorList biases) {
  const at::Device device = zoo::device_of(given);
  check_device(given, "x", device);
  const Dtype dtype = dtype_of(given, "x");
  const Matrix m = matrix_of(given, "x");
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), "there are ", weights.size(), " weights and ",
                    biases.size(), " biases; give one for each, or none.");
  std::vector<ThinLinear> calls;
  calls.reserve(weights.size());
  int64_t sum = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const at::Tensor& weight = weights[i];
    const Name name{"weights", int64_t(i)};
    check_dims(weight, name, 2);
    ThinLinear c{};
    c.dtype = dtype;
    c.tokens = m.rows;
    c.rows = weight.size(0);
    c.columns = m.dim;
    check_argument(weight, name, {c.rows, c.columns}, given.scalar_type(), device);
    c.w = weight.const_data_ptr();
    if (!biases.empty()) {
      const at::Tensor& bias = biases[i];
      c.bias_dtype = dtype_of(bias, {"biases", int64_t(i)});
      check_argument(bias, {"biases", int64_t(i)}, {c.rows}, bias.scalar_type(), device);
      c.bias = bias.const_data_ptr();
    }
    sum += c.rows;
    calls.push_back(c);
  }
  const at::Tensor x = given.contiguous();
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = sum;
  at::Tensor y = new_tensor(x, shape, x.scalar_type());
  if (y.numel() == 0) return y;
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (ThinLinear& c : calls) {
    c.x = x.const_data_ptr();
    c.y = to;
    c.stride = sum;
    ZOO_LAUNCH(thin_linear, x, c);
    to += c.rows * (dtype == F32 ? 4 : 2);
  }
  return y;
}

}  // namespace

ZOO_OPERATORS(define) { define("thin_linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", forward); }

}  // namespace zoo
