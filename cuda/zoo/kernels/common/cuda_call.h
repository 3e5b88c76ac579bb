// What every binding on CUDA does around a kernel: the device of the tensors becomes the current one, work goes to the
// current stream of that device, scratch memory is the caching allocator's (which hands it out again in the order of
// that stream), and an error of CUDA becomes a RuntimeError with the name of the operation.
//
// It uses torch/library.h, as the bindings on the CPU do and for the same reasons (update/binding.cpp).
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "checks.h"

namespace zoo {

class CudaCall {
 public:
  CudaCall(const char* op, const at::Tensor& tensor)
      : op_(op),
        tensor_(tensor),
        guard_(tensor.device()),
        stream_(c10::cuda::getCurrentCUDAStream(tensor.device().index())) {}

  void* stream() const { return stream_.stream(); }

  at::Tensor scratch(int64_t numel, at::ScalarType dtype) const {
    return tensor_.new_empty({numel}, tensor_.options().dtype(dtype).requires_grad(false));
  }

  void check(int32_t error) const {
    TORCH_CHECK(error == cudaSuccess, "zoo::", op_, " failed on ", tensor_.device(), ": ",
                cudaGetErrorString(cudaError_t(error)), " (cudaError ", error, ").");
  }

 private:
  const char* op_;
  const at::Tensor& tensor_;
  c10::DeviceGuard guard_;
  c10::cuda::CUDAStream stream_;
};

}  // namespace zoo
