// The stream that a binding asks torch for: emulated kernels run at once, on none.
#pragma once
#include <c10/core/Device.h>

namespace c10::cuda {

struct CUDAStream {
  void* stream() const { return nullptr; }
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex) { return {}; }

}  // namespace c10::cuda
