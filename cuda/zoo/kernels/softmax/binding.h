// What the bindings of softmax on CPUs and on CUDA share: the checks and the results.
#pragma once

#include "../common/arguments.h"
#include "softmax.h"

namespace zoo {

inline Matrix check_scores(const at::Tensor& t, const char* what, const at::Device& device) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && t.dim() <= MAX_ROW_DIMS + 1, what, " has shape ", t.sizes(), "; it must have 2 to ",
                    MAX_ROW_DIMS + 1, " dims.");
  dtype_of(t, what);
  check_memory(t, what, device);
  return matrix_of(t, what);
}

// The mask has the shape of x by strides; where it is broadcast they are 0.
inline void set_mask(Softmax& c, const at::Tensor& mask, const at::Tensor& x, const at::Device& device) {
  c.mask_dtype = dtype_of(mask, "mask");
  TORCH_CHECK_VALUE(mask.device() == device, "mask is on ", mask.device(), "; all tensors must be on ", name_of(device),
                    ".");
  TORCH_CHECK_VALUE(mask.layout() == at::kStrided, "mask is ", mask.layout(), "; it must be dense.");
  TORCH_CHECK_VALUE(mask.sizes() == x.sizes(), "mask has shape ", mask.sizes(), "; it must be ", x.sizes(), ".");
  TORCH_CHECK_VALUE(mask.numel() == 0 || mask.size(-1) == 1 || mask.stride(-1) == 1, "mask of shape ", mask.sizes(),
                    " has strides ", mask.strides(), "; its last dim must be contiguous.");
  c.mask = mask.const_data_ptr();
  for (int32_t k = 0; k < c.row_dims; ++k) c.mask_strides[k] = mask.stride(k);
}

// launch(c, x)
template <class Launch>
at::Tensor softmax(const at::Tensor& x, const std::optional<at::Tensor>& mask, double scale, bool causal,
                   at::DeviceType kind, const Launch& launch) {
  const at::Device device = device_of(x, kind);
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
  launch(c, x);
  return y;
}

// launch(c, y)
template <class Launch>
at::Tensor softmax_backward(const at::Tensor& grad_y, const at::Tensor& y, double scale, at::DeviceType kind,
                            const Launch& launch) {
  const at::Device device = device_of(y, kind);
  const Matrix m = check_scores(y, "y", device);
  check_argument(grad_y, "grad_y", y.sizes(), y.scalar_type(), device);
  at::Tensor grad_x = new_like(y);
  launch(SoftmaxBackward{grad_y.const_data_ptr(), y.const_data_ptr(), grad_x.mutable_data_ptr(), m.rows, m.dim,
                         float(scale), dtype_of(y, "y")}, y);
  return grad_x;
}

}  // namespace zoo
