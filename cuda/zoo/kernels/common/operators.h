// Where torch ends and a kernel begins. A binding is one source for both devices: it is compiled into the library for
// CPUs and, with ZOO_CUDA, into the one for CUDA.
//
// It uses torch/library.h and not libtorch's stable ABI: that one hands a list of tensors over at about 0.45 µs a
// tensor, against 0.13 µs here, which alone would be half of an AdamW step on tensors of 4,160 elements; and it does
// not exist before torch 2.9. torch/extension.h, the slow header, is not needed.
#pragma once

#if defined(ZOO_CUDA)
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

#include <string>
#include <type_traits>

#include "checks.h"
#include "isa.h"
#include "scratch.h"

namespace zoo {

// A new tensor beside `like`, contiguous. Unlike empty_like, this needs no operator's header.
inline at::Tensor new_tensor(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return like.new_empty(shape, like.options().dtype(dtype).requires_grad(false));
}

inline at::Tensor new_like(const at::Tensor& t) { return new_tensor(t, t.sizes(), t.scalar_type()); }

#if defined(ZOO_CUDA)

// Memory for a kernel beside `like`: the caching allocator's, which hands it out again in the order of the stream.
template <class T>
class KernelScratch {
 public:
  KernelScratch(const at::Tensor& like, int64_t count)
      : memory_(new_tensor(like, {count * int64_t(sizeof(T))}, at::kByte)) {}
  T* data() const { return static_cast<T*>(memory_.mutable_data_ptr()); }

 private:
  at::Tensor memory_;
};

// The device of the tensors is the current one, and its current stream the one to work on, as long as this lives.
class OnStream {
 public:
  explicit OnStream(const at::Tensor& tensor)
      : device_(tensor.device()), guard_(device_), stream_(c10::cuda::getCurrentCUDAStream(device_.index())) {}

  void* stream() const { return stream_.stream(); }

  void check(const char* kernel, int32_t error) const {
    TORCH_CHECK(error == cudaSuccess, "zoo::", kernel, " failed on ", device_, ": ",
                cudaGetErrorString(cudaError_t(error)), " (cudaError ", error, ").");
  }

 private:
  at::Device device_;
  c10::DeviceGuard guard_;
  c10::cuda::CUDAStream stream_;
};

// Runs the kernel NAME where `LIKE` is; an error of CUDA is a RuntimeError with the kernel's name.
#define ZOO_LAUNCH(NAME, LIKE, ...)                               \
  do {                                                            \
    const ::zoo::OnStream on(LIKE);                               \
    on.check(#NAME, ::zoo::cuda::NAME(__VA_ARGS__, on.stream())); \
  } while (false)

#else

template <class T>
class KernelScratch : public Scratch<T> {
 public:
  KernelScratch(const at::Tensor&, int64_t count) : Scratch<T>(count) {}
};

#define ZOO_LAUNCH(NAME, LIKE, ...) ZOO_DISPATCH(NAME, __VA_ARGS__)

#endif

// define("name(arguments) -> results", function): the library for CPUs, which is always loaded first, brings the
// schema.
class Operators {
 public:
  explicit Operators(torch::Library& library) : library_(library) {}

  template <class Function>
  void operator()(const std::string& schema, Function* function) {
#if defined(ZOO_CUDA)
    constexpr c10::DispatchKey key = c10::DispatchKey::CUDA;
#else
    constexpr c10::DispatchKey key = c10::DispatchKey::CPU;
    library_.def(schema.c_str());
#endif
    library_.impl(schema.substr(0, schema.find('(')).c_str(), torch::dispatch(key, function));
  }

#if !defined(ZOO_CUDA)
  // One that is made of other operators, which find the kernels of their tensors' device: once, for all devices.
  template <class Function>
  void of_operators(const std::string& schema, Function* function) {
    library_.def(schema.c_str());
    library_.impl(schema.substr(0, schema.find('(')).c_str(),
                  torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, function));
  }
#endif

 private:
  torch::Library& library_;
};

}  // namespace zoo

// Begins the function that defines the operators of a binding: ZOO_OPERATORS(define) { define(...); ... }
#define ZOO_OPERATORS(DEFINE)                                        \
  static void define_operators(Operators DEFINE);                    \
  TORCH_LIBRARY_FRAGMENT(zoo, m) { define_operators(Operators(m)); } \
  static void define_operators(Operators DEFINE)
