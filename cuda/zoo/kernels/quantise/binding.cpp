// Quantisation as operators of torch.
#include "binding.h"
#include "quantise_cpu.h"

namespace zoo {
namespace {

std::tuple<at::Tensor, at::Tensor> quantise_(const at::Tensor& x, int64_t bits, int64_t group, int64_t nodes,
                                            int64_t local) {
  return quantise(x, bits, group, nodes, local, at::kCPU,
                  [](const at::Tensor& t, Dtype dtype, int b, int8_t* q, float* scales, int64_t n, int64_t g,
                     const Swizzle& swizzle) { 
                    quantise_cpu(t.const_data_ptr(), dtype, b, q, scales, n, g, swizzle);
                   });
}

void dequantise_(const at::Tensor& out, const at::Tensor& q, const at::Tensor& scales, int64_t bits, int64_t group,
                 int64_t ranks, double factor) {
  dequantise(out, q, scales, bits, group, ranks, factor, at::kCPU,
             [](const at::Tensor& t, Dtype dtype, int b, const int8_t* from, const float* s, int64_t count, float f,
                int64_t n, int64_t g) { 
               dequantise_cpu(writable(t), dtype, b, from, s, count, f, n, g);
              });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("quantise(Tensor x, int bits, int group_size, int nodes, int local) -> (Tensor, Tensor)");
  m.def(
      "dequantise_(Tensor(a!) out, Tensor q, Tensor scales, int bits, int group_size, int ranks, float factor) -> ()");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("quantise", &quantise_);
  m.impl("dequantise_", &dequantise_);
}

}  // namespace zoo
