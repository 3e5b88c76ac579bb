// What the bindings of operations on single tensors ask of them. Each refusal is a ValueError in Python, with the
// numbers.
#pragma once

#include "checks.h"

namespace zoo {

inline Dtype dtype_of(const at::Tensor& t, const char* what) { return format_of(t, what); }

// Dense, contiguous and on the device of the call.
inline void check_memory(const at::Tensor& t, const char* what, const at::Device& device = at::Device(at::kCPU)) {
  TORCH_CHECK_VALUE(t.device() == device, what, " is on ", t.device(), "; all tensors must be on ", name_of(device),
                    ".");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, what, " is ", t.layout(), "; it must be dense.");
  TORCH_CHECK_VALUE(t.is_contiguous(), what, " of shape ", t.sizes(), " has strides ", t.strides(),
                    "; it must be contiguous: pass .contiguous().");
}

inline void check_argument(const at::Tensor& t, const char* what, at::IntArrayRef shape, at::ScalarType dtype,
                           const at::Device& device = at::Device(at::kCPU)) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, what, " is ", t.scalar_type(), "; it must be ", dtype, ".");
  TORCH_CHECK_VALUE(t.sizes() == shape, what, " has shape ", t.sizes(), "; it must be ", shape, ".");
  check_memory(t, what, device);
}

// Unlike empty_like, this needs no operator's header; the result is contiguous.
inline at::Tensor new_like(const at::Tensor& t) { return t.new_empty(t.sizes(), t.options().requires_grad(false)); }

// (T, D) of a tensor (..., D).
struct Matrix {
  int64_t rows, dim;
};

inline Matrix matrix_of(const at::Tensor& t, const char* what) {
  TORCH_CHECK_VALUE(t.dim() >= 1, what, " has no dims; it must have at least one.");
  Matrix m{1, t.size(-1)};
  for (int64_t i = 0; i + 1 < t.dim(); ++i) m.rows *= t.size(i);
  return m;
}

}  // namespace zoo
