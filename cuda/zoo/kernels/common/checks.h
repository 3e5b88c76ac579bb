// What the bindings ask of their tensors. Each refusal is a ValueError in Python, with the numbers;
// zoo/kernels/checks.py has the same sentences for where no binding is.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <ostream>
#include <string>

#include "numbers.h"

namespace zoo {

#if defined(ZOO_CUDA)
inline constexpr at::DeviceType DEVICE = at::kCUDA;
#else
inline constexpr at::DeviceType DEVICE = at::kCPU;
#endif

// What a message calls a tensor: an argument, or one of a list.
struct Name {
  Name(const char* argument) : what(argument) {}  // NOLINT: a name is a name
  Name(const char* argument, int64_t place) : what(argument), index(place) {}

  const char* what;
  int64_t index = -1;
};

inline std::ostream& operator<<(std::ostream& out, const Name& name) {
  out << name.what;
  return name.index < 0 ? out : out << "[" << name.index << "]";
}

// As Python writes it.
inline const char* dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "torch.float32";
    case at::kBFloat16:
      return "torch.bfloat16";
    case at::kHalf:
      return "torch.float16";
    case at::kDouble:
      return "torch.float64";
    case at::kLong:
      return "torch.int64";
    case at::kChar:
      return "torch.int8";
    case at::kByte:
      return "torch.uint8";
    default:
      return c10::toString(dtype);
  }
}

inline Dtype dtype_of(const at::Tensor& tensor, const Name& name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return F32;
    case at::kBFloat16:
      return BF16;
    case at::kHalf:
      return F16;
    default:
      TORCH_CHECK_VALUE(false, name, " is ", dtype_name(tensor.scalar_type()),
                        "; allowed are torch.float32, torch.bfloat16 and torch.float16.");
  }
}

// The device of a call: that of its first tensor. A call comes to the kernels of a kind of device for any of its
// tensors, so the first may be elsewhere; then no tensor passes, and the message names the kind.
inline at::Device device_of(const at::Tensor& first) {
  return first.device().type() == DEVICE ? first.device() : at::Device(DEVICE);
}

// The first of a list, which says where a call runs.
inline const at::Tensor& head_of(at::TensorList list, const char* what) {
  TORCH_CHECK_VALUE(!list.empty(), what, " has no tensors; it must have at least one.");
  return list[0];
}

inline std::string name_of(const at::Device& device) { return device.is_cpu() ? "the CPU" : device.str(); }

inline void check_device(const at::Tensor& t, const Name& name, const at::Device& device) {
  TORCH_CHECK_VALUE(t.device() == device, name, " is on ", t.device(), "; all tensors must be on ", name_of(device),
                    ".");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " is ", t.layout(), "; it must be dense.");
}

inline void check_contiguous(const at::Tensor& t, const Name& name) {
  TORCH_CHECK_VALUE(t.is_contiguous(), name, " of shape ", t.sizes(), " has strides ", t.strides(),
                    "; it must be contiguous: pass .contiguous().");
}

// Dense, contiguous and on the device of the call.
inline void check_memory(const at::Tensor& t, const Name& name, const at::Device& device) {
  check_device(t, name, device);
  check_contiguous(t, name);
}

inline void check_dtype(const at::Tensor& t, const Name& name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, name, " is ", dtype_name(t.scalar_type()), "; it must be ",
                    dtype_name(dtype), ".");
}

inline void check_dims(const at::Tensor& t, const Name& name, int64_t dims) {
  TORCH_CHECK_VALUE(t.dim() == dims, name, " has shape ", t.sizes(), "; it must have ", dims, " dims.");
}

// Of this shape and dtype besides.
inline void check_argument(const at::Tensor& t, const Name& name, at::IntArrayRef shape, at::ScalarType dtype,
                           const at::Device& device) {
  check_dtype(t, name, dtype);
  TORCH_CHECK_VALUE(t.sizes() == shape, name, " has shape ", t.sizes(), "; it must be ", shape, ".");
  check_memory(t, name, device);
}

// One of a list: of any shape of `numel` elements, as params[index] has, and of the dtype of its list.
inline void check_tensor(const at::Tensor& t, const Name& name, int64_t numel, Dtype expected,
                         const at::Device& device) {
  check_device(t, name, device);
  TORCH_CHECK_VALUE(t.numel() == numel, name, " has shape ", t.sizes(), ", ", t.numel(), " elements; params[",
                    name.index, "] has ", numel, ".");
  check_contiguous(t, name);
  TORCH_CHECK_VALUE(numel == 0 || t.storage().data() != nullptr, name, " of shape ", t.sizes(),
                    " has no memory: its storage was emptied, or it is of a subclass such as DTensor, of which the "
                    "local part can be given (to_local()).");
  const size_t wanted = size_t(t.storage_offset() + numel) * t.element_size();
  TORCH_CHECK_VALUE(numel == 0 || t.storage().nbytes() >= wanted, name, " of shape ", t.sizes(),
                    " ends beyond its memory, at byte ", wanted, " of ", t.storage().nbytes(),
                    ": its storage was resized. Resize it back, or give another tensor.");
  const Dtype found = dtype_of(t, name);
  TORCH_CHECK_VALUE(found == expected, name, " is ", dtype_name(t.scalar_type()), ", unlike ", name.what,
                    "[0]; the tensors of one call share a dtype: call once for each.");
}

// Flat data, of any shape of `numel` elements of one dtype.
inline void check_flat(const at::Tensor& t, const Name& name, int64_t numel, at::ScalarType dtype,
                       const at::Device& device) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype && t.layout() == at::kStrided && t.numel() == numel && t.is_contiguous() &&
                        t.device() == device,
                    name, " is ", dtype_name(t.scalar_type()), " of shape ", t.sizes(), " on ", t.device(),
                    "; it must have ", numel, " elements of ", dtype_name(dtype), ", be contiguous, and be on ",
                    name_of(device), ".");
}

// (T, D) of a tensor (..., D).
struct Matrix {
  int64_t rows, dim;
};

inline Matrix matrix_of(const at::Tensor& t, const Name& name) {
  TORCH_CHECK_VALUE(t.dim() >= 1, name, " has no dims; it must have at least one.");
  Matrix m{1, t.size(-1)};
  for (int64_t i = 0; i + 1 < t.dim(); ++i) m.rows *= t.size(i);
  return m;
}

// Where the elements are. Kernels write behind autograd's back, so the version that it compares is raised here.
inline void* writable(const at::Tensor& t) {
  void* memory = t.mutable_data_ptr();
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  return memory;
}

}  // namespace zoo
