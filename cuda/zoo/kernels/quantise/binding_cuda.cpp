// Quantisation on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "binding.h"
#include "quantise_cuda.h"

namespace zoo {
namespace {

std::tuple<at::Tensor, at::Tensor> quantise_(const at::Tensor& x, int64_t bits, int64_t group, int64_t nodes,
                                            int64_t local) {
  return quantise(x, bits, group, nodes, local, at::kCUDA,
                  [](const at::Tensor& t, Dtype dtype, int b, int8_t* q, float* scales, int64_t n, int64_t g,
                     const Swizzle& swizzle) { 
                    const CudaCall call("quantise", t);
                    call.check(zoo_quantise_cuda(t.const_data_ptr(), dtype, b, q, scales, n, g, &swizzle, call.stream()));
                   });
}

void dequantise_(const at::Tensor& out, const at::Tensor& q, const at::Tensor& scales, int64_t bits, int64_t group,
                 int64_t ranks, double factor) {
  dequantise(out, q, scales, bits, group, ranks, factor, at::kCUDA,
             [](const at::Tensor& t, Dtype dtype, int b, const int8_t* from, const float* s, int64_t count, float f,
                int64_t n, int64_t g) { 
               const CudaCall call("dequantise_", t);
               call.check(zoo_dequantise_cuda(writable(t), dtype, b, from, s, count, f, n, g, call.stream()));
              });
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("quantise", &quantise_);
  m.impl("dequantise_", &dequantise_);
}

}  // namespace zoo
