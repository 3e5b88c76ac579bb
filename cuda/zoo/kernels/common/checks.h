// What the bindings ask of their tensors. Each refusal is a ValueError in Python, with the numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "numbers.h"

namespace zoo {

// The format of a tensor; `name` are the parts of what a message calls it.
template <class... Name>
inline Dtype format_of(const at::Tensor& tensor, const Name&... name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return F32;
    case at::kBFloat16:
      return BF16;
    case at::kHalf:
      return F16;
    default:
      TORCH_CHECK_VALUE(false, name..., " is ", tensor.scalar_type(),
                        "; allowed are torch.float32, torch.bfloat16 and torch.float16.");
  }
}

inline Dtype dtype_of(const at::Tensor& tensor, const char* what, int64_t index) {
  return format_of(tensor, what, "[", index, "]");
}

// The device of a call: that of its first tensor. A call comes to the kernels of a kind of device for any of its
// tensors, so the first may be elsewhere; then no tensor passes, and the message names the kind.
inline at::Device device_of(const at::Tensor& first, at::DeviceType kind) {
  return first.device().type() == kind ? first.device() : at::Device(kind);
}

inline std::string name_of(const at::Device& device) { return device.is_cpu() ? "the CPU" : device.str(); }

// Dense, on the device of the call, contiguous, of `numel` elements and of the format of its list.
inline void check_tensor(const at::Tensor& t, const char* what, int64_t index, int64_t numel, Dtype expected,
                         const at::Device& device = at::Device(at::kCPU)) {
  TORCH_CHECK_VALUE(t.device() == device, what, "[", index, "] is on ", t.device(), "; all tensors must be on ",
                    name_of(device), ".");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, what, "[", index, "] is ", t.layout(), "; it must be dense.");
  TORCH_CHECK_VALUE(t.numel() == numel, what, "[", index, "] has shape ", t.sizes(), ", ", t.numel(),
                    " elements; params[", index, "] has ", numel, ".");
  TORCH_CHECK_VALUE(t.is_contiguous(), what, "[", index, "] of shape ", t.sizes(), " has strides ", t.strides(),
                    "; it must be contiguous: pass .contiguous().");
  const Dtype found = dtype_of(t, what, index);
  TORCH_CHECK_VALUE(found == expected, what, "[", index, "] is ", t.scalar_type(), ", unlike ", what,
                    "[0]; the tensors of one call share a dtype: call once for each.");
}

// Where the elements are. Kernels write behind autograd's back, so the version that it compares is raised here.
inline void* writable(const at::Tensor& t) {
  void* memory = t.mutable_data_ptr();
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  return memory;
}

}  // namespace zoo
