// Quantisation as operators of torch.
#include <tuple>

#include "../common/operators.h"
#include "quantise.h"

namespace zoo {
namespace {

void check_options(int64_t bits, int64_t group) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits=", bits, "; it must be 8 or 4.");
  TORCH_CHECK_VALUE(group >= QUANT_GROUP_UNIT && group <= QUANT_GROUP_MAX && group % QUANT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", QUANT_GROUP_UNIT, " from ", QUANT_GROUP_UNIT,
                    " to ", QUANT_GROUP_MAX, ".");
}

// minima: undefined for symmetric quantisation.
struct Quantised {
  at::Tensor q, scales, minima;
};

Quantised quantised(const at::Tensor& x, int64_t bits, int64_t group, int64_t nodes, int64_t local, bool symmetric) {
  check_options(bits, group);
  const int64_t n = x.numel(), groups = ceil_div(n, group);
  const Dtype dtype = dtype_of(x, "x");
  check_memory(x, "x", device_of(x));
  TORCH_CHECK_VALUE(nodes >= 1 && local >= 1 && (nodes * local == 1 || n % (nodes * local * group) == 0), "swizzle=(",
                    nodes, ", ", local, ") cuts ", n, " elements into ", nodes, " x ", local,
                    " pieces; each must be a whole number of groups of ", group, ".");
  Quantised found{new_tensor(x, {ceil_div(n * bits, 8)}, symmetric ? at::kChar : at::kByte),
                  new_tensor(x, {groups}, at::kFloat), symmetric ? at::Tensor() : new_tensor(x, {groups}, at::kFloat)};
  const int64_t piece = groups / (nodes * local);
  const Swizzle swizzle{nodes, local, piece > 0 ? piece : 1};
  ZOO_LAUNCH(quantise, x, x.const_data_ptr(), dtype, int32_t(bits), found.q.mutable_data_ptr(),
             found.scales.mutable_data_ptr<float>(), symmetric ? nullptr : found.minima.mutable_data_ptr<float>(), n,
             group, swizzle);
  return found;
}

std::tuple<at::Tensor, at::Tensor> quantise_symmetric(const at::Tensor& x, int64_t bits, int64_t group, int64_t nodes,
                                                      int64_t local) {
  const Quantised found = quantised(x, bits, group, nodes, local, true);
  return {found.q, found.scales};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantise_asymmetric(const at::Tensor& x, int64_t bits, int64_t group,
                                                                   int64_t nodes, int64_t local) {
  const Quantised found = quantised(x, bits, group, nodes, local, false);
  return {found.q, found.scales, found.minima};
}

void dequantise_tensor(const at::Tensor& out, const Quantised& from, int64_t bits, int64_t group, int64_t ranks,
                       double factor) {
  const bool symmetric = !from.minima.defined();
  check_options(bits, group);
  const int64_t n = out.numel();
  const Dtype dtype = dtype_of(out, "out");
  const at::Device device = device_of(out);
  check_memory(out, "out", device);
  TORCH_CHECK_VALUE(ranks >= 1, "ranks=", ranks, "; it must be at least 1.");
  check_flat(from.q, "q", ranks * ceil_div(n * bits, 8), symmetric ? at::kChar : at::kByte, device);
  check_flat(from.scales, "scales", ranks * ceil_div(n, group), at::kFloat, device);
  if (!symmetric) check_flat(from.minima, "minima", ranks * ceil_div(n, group), at::kFloat, device);
  ZOO_LAUNCH(dequantise, out, writable(out), dtype, int32_t(bits), from.q.const_data_ptr(),
             from.scales.const_data_ptr<float>(), symmetric ? nullptr : from.minima.const_data_ptr<float>(), ranks,
             float(factor), n, group);
}

void dequantise_symmetric(const at::Tensor& out, const at::Tensor& q, const at::Tensor& scales, int64_t bits,
                          int64_t group, int64_t ranks, double factor) {
  dequantise_tensor(out, {q, scales, {}}, bits, group, ranks, factor);
}

void dequantise_asymmetric(const at::Tensor& out, const at::Tensor& q, const at::Tensor& scales,
                           const at::Tensor& minima, int64_t bits, int64_t group, int64_t ranks, double factor) {
  dequantise_tensor(out, {q, scales, minima}, bits, group, ranks, factor);
}

}  // namespace

ZOO_OPERATORS(define) {
  define("quantise(Tensor x, int bits, int group_size, int nodes, int local) -> (Tensor, Tensor)", quantise_symmetric);
  define("quantise_asymmetric(Tensor x, int bits, int group_size, int nodes, int local) -> (Tensor, Tensor, Tensor)",
         quantise_asymmetric);
  define(
      "dequantise_(Tensor(a!) out, Tensor q, Tensor scales, int bits, int group_size, int ranks, float factor) -> ()",
      dequantise_symmetric);
  define(
      "dequantise_asymmetric_(Tensor(a!) out, Tensor q, Tensor scales, Tensor minima, int bits, int group_size, "
      "int ranks, float factor) -> ()",
      dequantise_asymmetric);
}

}  // namespace zoo
