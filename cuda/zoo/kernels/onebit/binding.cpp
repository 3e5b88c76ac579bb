// 1-bit compression as operators of torch.
#include "binding.h"
#include "onebit_cpu.h"

namespace zoo {
namespace {

std::tuple<at::Tensor, at::Tensor> compress_(const at::Tensor& x, const at::Tensor& error, int64_t group) {
  return onebit_compress(x, error, group, at::kCPU,
                         [](const at::Tensor& t, Dtype dtype, float* e, uint8_t* bits, float* scales, int64_t n,
                            int64_t g) { 
                           onebit_compress_cpu(t.const_data_ptr(), dtype, e, bits, scales, n, g);
                          });
}

void decompress_(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group, bool add) {
  onebit_decompress(out, bits, scales, group, at::kCPU,
                    [=](const at::Tensor& t, Dtype dtype, const uint8_t* b, const float* s, int64_t n) { 
                      onebit_decompress_cpu(writable(t), dtype, b, s, add, n, group);
                     });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("onebit_compress_(Tensor x, Tensor(a!) error, int group_size) -> (Tensor, Tensor)");
  m.def("onebit_decompress_(Tensor(a!) out, Tensor bits, Tensor scales, int group_size, bool add) -> ()");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("onebit_compress_", &compress_);
  m.impl("onebit_decompress_", &decompress_);
}

}  // namespace zoo
