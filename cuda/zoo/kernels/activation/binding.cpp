// Activations as operators of torch.
#include <vector>

#include "../common/operators.h"
#include "activation.h"

namespace zoo {
namespace {

Form form_of(c10::string_view name) {
  if (name == "silu") return SILU;
  if (name == "gelu") return GELU;
  if (name == "gelu_tanh") return GELU_BY_TANH;
  TORCH_CHECK_VALUE(name == "relu", "activation is '", name, "'; it must be 'gelu', 'gelu_tanh', 'relu' or 'silu'.");
  return RELU;
}

Activation checked(const at::Tensor& a, const at::Tensor& pre, c10::string_view activation, bool gated,
                   const at::Device& device) {
  const Matrix m = matrix_of(a, "a");
  Activation c{};
  c.dtype = dtype_of(a, "a");
  check_memory(a, "a", device);
  c.form = form_of(activation);
  c.gated = gated;
  c.rows = m.rows;
  c.dim = m.dim;
  c.a = writable(a);
  std::vector<int64_t> wide(a.sizes().begin(), a.sizes().end());
  if (gated) wide.back() *= 2;
  check_argument(pre, "pre", wide, a.scalar_type(), device);
  c.pre = pre.const_data_ptr();
  return c;
}

void forward(const at::Tensor& a, const at::Tensor& pre, c10::string_view activation, bool gated) {
  const Activation c = checked(a, pre, activation, gated, device_of(a));
  ZOO_LAUNCH(activate, a, c);
}

void backward(const at::Tensor& a, const at::Tensor& grad_pre, const at::Tensor& grad_a, const at::Tensor& pre,
              c10::string_view activation, bool gated) {
  const at::Device device = device_of(a);
  Activation c = checked(a, pre, activation, gated, device);
  check_argument(grad_pre, "grad_pre", pre.sizes(), a.scalar_type(), device);
  check_argument(grad_a, "grad_a", a.sizes(), a.scalar_type(), device);
  c.grad_pre = writable(grad_pre);
  c.grad_a = grad_a.const_data_ptr();
  ZOO_LAUNCH(activate_backward, a, c);
}

}  // namespace

ZOO_OPERATORS(define) {
  define("activate_(Tensor(a!) a, Tensor pre, str activation, bool gated) -> ()", forward);
  define(
      "activate_backward_(Tensor(a!) a, Tensor(b!) grad_pre, Tensor grad_a, Tensor pre, str activation, bool gated) "
      "-> ()",
      backward);
}

}  // namespace zoo
