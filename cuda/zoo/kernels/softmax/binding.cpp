// Softmax as operators of torch.
#include "../common/operators.h"
#include "softmax.h"

namespace zoo {
namespace {

Matrix check_scores(const at::Tensor& t, const char* what, const at::Device& device) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.dim() <= MAX_ROW_DIMS + 1, what, " has shape ", t.sizes(), "; it must have 2 to ",
                    MAX_ROW_DIMS + 1, " dims.");
  dtype_of(t, what);
  check_memory(t, what, device);
  return matrix_of(t, what);
}

// The mask has the shape of x by strides; where it is broadcast they are 0.
void set_mask(Softmax& c, const at::Tensor& mask, const at::Tensor& x, const at::Device& device) {
  c.mask_dtype = dtype_of(mask, "mask");
  check_device(mask, "mask", device);
  TORCH_CHECK_VALUE(mask.sizes() == x.sizes(), "mask has shape ", mask.sizes(), "; it must be ", x.sizes(), ".");
  TORCH_CHECK_VALUE(mask.numel() == 0 || mask.size(-1) == 1 || mask.stride(-1) == 1, "mask of shape ", mask.sizes(),
                    " has strides ", mask.strides(), "; its last dim must be contiguous.");
  c.mask = mask.const_data_ptr();
  for (int32_t k = 0; k < c.row_dims; ++k) c.mask_strides[k] = mask.stride(k);
}

at::Tensor forward(const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool causal) {
  const at::Device device = device_of(x);
  Softmax c{};
  const Matrix m = check_scores(x, "x", device);
  c.x = x.const_data_ptr();
  c.rows = m.rows;
  c.queries = x.size(-2);
  c.keys = m.dim;
  c.row_dims = int32_t(x.dim() - 1);
  for (int32_t k = 0; k < c.row_dims; ++k) c.sizes[k] = x.size(k);
  c.scale = float(scale);
  c.causal = causal;
  c.dtype = dtype_of(x, "x");
  if (mask.has_value()) set_mask(c, *mask, x, device);
  at::Tensor y = new_like(x);
  c.y = y.mutable_data_ptr();
  ZOO_LAUNCH(softmax, x, c);
  return y;
}

at::Tensor backward(const at::Tensor& grad_y, const at::Tensor& y, double scale) {
  const at::Device device = device_of(y);
  const Matrix m = check_scores(y, "y", device);
  check_argument(grad_y, "grad_y", y.sizes(), y.scalar_type(), device);
  at::Tensor grad_x = new_like(y);
  const SoftmaxBackward c{
      grad_y.const_data_ptr(), y.const_data_ptr(), grad_x.mutable_data_ptr(), m.rows, m.dim, float(scale),
      dtype_of(y, "y")};
  ZOO_LAUNCH(softmax_backward, y, c);
  return grad_x;
}

}  // namespace

ZOO_OPERATORS(define) {
  define("softmax(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor", forward);
  define("softmax_backward(Tensor grad_y, Tensor y, float scale) -> Tensor", backward);
}

}  // namespace zoo
