// 1-bit compression as operators of torch.
#include <tuple>

#include "../common/operators.h"
#include "onebit.h"

namespace zoo {
namespace {

void check_group(int64_t group) {
  TORCH_CHECK_VALUE(group >= ONEBIT_GROUP_UNIT && group <= ONEBIT_GROUP_MAX && group % ONEBIT_GROUP_UNIT == 0,
                    "group_size=", group, "; it must be a multiple of ", ONEBIT_GROUP_UNIT, " from ", ONEBIT_GROUP_UNIT,
                    " to ", ONEBIT_GROUP_MAX, ".");
}

using Maybe = std::optional<at::Tensor>;

// What is owed from before: a tensor or nothing, and what stands for it, if that was sent.
struct Before {
  const float* error = nullptr;
  const uint8_t* bits = nullptr;
  const float* scales = nullptr;
};

Before before_of(const Maybe& error, const Maybe& bits, const Maybe& scales, int64_t n, int64_t group,
                 const at::Device& device) {
  TORCH_CHECK_VALUE(bits.has_value() == scales.has_value() && (error.has_value() || !bits.has_value()),
                    "sent bits, sent scales and the error that they stand for go together.");
  Before before;
  if (error) {
    check_flat(*error, "error", n, at::kFloat, device);
    before.error = error->const_data_ptr<float>();
  }
  if (bits) {
    check_flat(*bits, "sent bits", ceil_div(n, 8), at::kByte, device);
    check_flat(*scales, "sent scales", ceil_div(n, group), at::kFloat, device);
    before.bits = bits->const_data_ptr<uint8_t>();
    before.scales = scales->const_data_ptr<float>();
  }
  return before;
}

std::tuple<at::Tensor, at::Tensor> new_wire(const at::Tensor& like, int64_t n, int64_t group) {
  return {new_tensor(like, {ceil_div(n, 8)}, at::kByte), new_tensor(like, {ceil_div(n, group)}, at::kFloat)};
}

std::tuple<at::Tensor, at::Tensor> compress(const at::Tensor& c, const Maybe& x, const Maybe& error,
                                            const Maybe& sent_bits, const Maybe& sent_scales, int64_t group) {
  check_group(group);
  const at::Tensor& from = x ? *x : c;
  const int64_t n = c.numel();
  const at::Device device = device_of(c);
  const Dtype dtype = dtype_of(from, "x");
  check_memory(from, "x", device);
  if (x) check_flat(*x, "x", n, x->scalar_type(), device);
  if (x || error) check_flat(c, x ? "out" : "x", n, at::kFloat, device);  // c goes there
  const Before before = before_of(error, sent_bits, sent_scales, n, group, device);
  const auto [bits, scales] = new_wire(c, n, group);
  float* const to = x || error ? static_cast<float*>(writable(c)) : nullptr;
  ZOO_LAUNCH(onebit_compress, c, to, from.const_data_ptr(), dtype, before.error, before.bits, before.scales,
             bits.mutable_data_ptr<uint8_t>(), scales.mutable_data_ptr<float>(), n, group);
  return {bits, scales};
}

std::tuple<at::Tensor, at::Tensor> compress_mean(const at::Tensor& c, const at::Tensor& wires, const Maybe& error,
                                                 const Maybe& sent_bits, const Maybe& sent_scales, int64_t group) {
  check_group(group);
  const int64_t n = c.numel(), needed = 4 * ceil_div(n, group) + ceil_div(n, 8);
  const at::Device device = device_of(c);
  check_flat(c, "out", n, at::kFloat, device);
  check_dims(wires, "wires", 2);
  const int64_t ranks = wires.size(0), stride = wires.size(1);
  check_flat(wires, "wires", ranks * stride, at::kByte, device);
  TORCH_CHECK_VALUE(ranks > 0 && stride % 4 == 0 && stride >= needed && wires.storage_offset() % 4 == 0,
                    "wires are of shape ", wires.sizes(), "; each of one or more rows must begin at a multiple of 4 ",
                    "bytes and have at least ", needed, " for ", n, " elements.");
  const Before before = before_of(error, sent_bits, sent_scales, n, group, device);
  const auto [bits, scales] = new_wire(c, n, group);
  ZOO_LAUNCH(onebit_compress_mean, c, static_cast<float*>(writable(c)), wires.const_data_ptr<uint8_t>(), stride, ranks,
             float(1.0 / double(ranks)), before.error, before.bits, before.scales, bits.mutable_data_ptr<uint8_t>(),
             scales.mutable_data_ptr<float>(), n, group);
  return {bits, scales};
}

void owed(const at::Tensor& error, const at::Tensor& c, const at::Tensor& bits, const at::Tensor& scales,
          int64_t group) {
  check_group(group);
  const int64_t n = error.numel();
  const at::Device device = device_of(error);
  check_flat(error, "error", n, at::kFloat, device);
  check_flat(c, "c", n, at::kFloat, device);
  check_flat(bits, "bits", ceil_div(n, 8), at::kByte, device);
  check_flat(scales, "scales", ceil_div(n, group), at::kFloat, device);
  ZOO_LAUNCH(onebit_owed, error, static_cast<float*>(writable(error)), c.const_data_ptr<float>(),
             bits.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(), n, group);
}

void decompress(const at::Tensor& out, const at::Tensor& bits, const at::Tensor& scales, int64_t group, bool add) {
  check_group(group);
  const int64_t n = out.numel();
  const Dtype dtype = dtype_of(out, "out");
  const at::Device device = device_of(out);
  check_memory(out, "out", device);
  check_flat(bits, "bits", ceil_div(n, 8), at::kByte, device);
  check_flat(scales, "scales", ceil_div(n, group), at::kFloat, device);
  ZOO_LAUNCH(onebit_decompress, out, writable(out), dtype, bits.const_data_ptr<uint8_t>(),
             scales.const_data_ptr<float>(), add, n, group);
}

}  // namespace

ZOO_OPERATORS(define) {
  define(
      "onebit_compress_(Tensor(a!) c, Tensor? x, Tensor? error, Tensor? sent_bits, Tensor? sent_scales, "
      "int group_size) -> (Tensor, Tensor)",
      compress);
  define(
      "onebit_compress_mean_(Tensor(a!) c, Tensor wires, Tensor? error, Tensor? sent_bits, Tensor? sent_scales, "
      "int group_size) -> (Tensor, Tensor)",
      compress_mean);
  define("onebit_owed_(Tensor(a!) error, Tensor c, Tensor bits, Tensor scales, int group_size) -> ()", owed);
  define("onebit_decompress_(Tensor(a!) out, Tensor bits, Tensor scales, int group_size, bool add) -> ()", decompress);
}

}  // namespace zoo
