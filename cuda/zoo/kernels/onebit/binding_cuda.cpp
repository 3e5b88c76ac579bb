// 1-bit compression on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "binding.h"
#include "onebit_cuda.h"

namespace zoo {
namespace {

std::tuple<at::Tensor, at::Tensor> compress_(const at::Tensor& x, const at::Tensor& error, int64_t group) {
  return onebit_compress(x, error, group, at::kCUDA,
                         [](const at::Tensor& t, Dtype dtype, float* e, uint8_t* bits, float* scales, int64_t n,
                            int64_t g) { 
                           const CudaCall call("onebit_compress_", t);
                           call.check(zoo_onebit_compress_cuda(t.const_data_ptr(), dtype, e, bits, scales, n, g,
                                                               call.stream()));
                          });
}

void decompress_(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group, bool add) {
  onebit_decompress(out, bits, scales, group, at::kCUDA,
                    [=](const at::Tensor& t, Dtype dtype, const uint8_t* b, const float* s, int64_t n) { 
                      const CudaCall call("onebit_decompress_", t);
                      call.check(zoo_onebit_decompress_cuda(writable(t), dtype, b, s, add, n, group, call.stream()));
                     });
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("onebit_compress_", &compress_);
  m.impl("onebit_decompress_", &decompress_);
}

}  // namespace zoo
