// Gating as operators of torch: dtypes, shapes, devices and options are checked on both devices, the values of indices
// and rows on CPUs alone. On CUDA that would wait for the GPU; gating.h has what becomes of them there.
#include <tuple>

#include "../common/operators.h"
#include "gating.h"

namespace zoo {
namespace {

using at::Tensor;

void check_matrix(const Tensor& t, const char* what, const at::Device& device) {
  dtype_of(t, what);
  check_dims(t, what, 2);
  check_memory(t, what, device);
}

// int64 (T, k).
void check_assignments(const Tensor& t, const char* what, const at::Device& device) {
  check_dtype(t, what, at::kLong);
  check_dims(t, what, 2);
  check_memory(t, what, device);
}

#if defined(ZOO_CUDA)

void check_values(const Tensor&, const char*, int64_t, int64_t, const char*) {}

void invert(const Tensor& rows, int64_t num_rows, int64_t* source) {
  ZOO_LAUNCH(invert_rows, rows, rows.const_data_ptr<int64_t>(), rows.numel(), num_rows, source);
}

#else

// All in [low, high).
void check_values(const Tensor& t, const char* what, int64_t low, int64_t high, const char* limit) {
  const int64_t *numbers = t.const_data_ptr<int64_t>(), n = t.numel(), k = t.size(1);
  for (int64_t at = 0; at < n; ++at)
    TORCH_CHECK_VALUE(numbers[at] >= low && numbers[at] < high, what, "[", at / k, ", ", at % k, "] is ", numbers[at],
                      "; it must be at least ", low, " and less than ", limit, ", here ", high, ".");
}

// source[rows[s]] = s, -1 elsewhere.
void invert(const Tensor& rows, int64_t num_rows, int64_t* source) {
  check_values(rows, "rows", -1, num_rows, "the number of rows");
  const int64_t *numbers = rows.const_data_ptr<int64_t>(), n = rows.numel(), k = rows.size(1);
  for (int64_t row = 0; row < num_rows; ++row) source[row] = -1;
  for (int64_t s = 0; s < n; ++s) {
    if (numbers[s] < 0) continue;
    TORCH_CHECK_VALUE(source[numbers[s]] < 0, "rows[", s / k, ", ", s % k, "] is ", numbers[s],
                      ", which an assignment before it has already; each must have a row of its own.");
    source[numbers[s]] = s;
  }
}

#endif

std::tuple<Tensor, Tensor> gate(const Tensor& logits, int64_t k, bool renormalise) {
  check_matrix(logits, "logits", device_of(logits));
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= experts, "k is ", k, "; it must be between 1 and the number of experts, here ",
                    experts, ".");
  Tensor probabilities = new_tensor(logits, {tokens, k}, at::kFloat);
  Tensor indices = new_tensor(logits, {tokens, k}, at::kLong);
  const Gate c{logits.const_data_ptr(),
               indices.mutable_data_ptr<int64_t>(),
               probabilities.mutable_data_ptr<float>(),
               tokens,
               experts,
               k,
               renormalise,
               dtype_of(logits, "logits")};
  ZOO_LAUNCH(top_k_gate, logits, c);
  return {probabilities, indices};
}

Tensor gate_backward(const Tensor& grad_probabilities, const Tensor& logits, const Tensor& indices, bool renormalise) {
  const at::Device device = device_of(logits);
  check_matrix(logits, "logits", device);
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check_assignments(indices, "indices", device);
  TORCH_CHECK_VALUE(indices.size(0) == tokens && indices.size(1) <= experts, "indices has shape ", indices.sizes(),
                    "; it must be (", tokens, ", at most ", experts, ").");
  check_argument(grad_probabilities, "grad_probabilities", indices.sizes(), at::kFloat, device);
  Tensor grad_logits = new_like(logits);
  check_values(indices, "indices", 0, experts, "the number of experts");
  const GateBackward c{grad_probabilities.const_data_ptr<float>(),
                       logits.const_data_ptr(),
                       indices.const_data_ptr<int64_t>(),
                       grad_logits.mutable_data_ptr(),
                       tokens,
                       experts,
                       indices.size(1),
                       renormalise,
                       dtype_of(logits, "logits")};
  ZOO_LAUNCH(top_k_gate_backward, logits, c);
  return grad_logits;
}

std::tuple<Tensor, Tensor, Tensor> places(const Tensor& indices, int64_t num_experts, std::optional<int64_t> capacity,
                                          bool choices_first, const std::optional<Tensor>& key) {
  TORCH_CHECK_VALUE(num_experts >= 1, "num_experts is ", num_experts, "; it must be at least 1.");
  TORCH_CHECK_VALUE(!capacity || *capacity >= 0, "capacity is ", *capacity, "; it must not be negative.");
  const at::Device device = device_of(indices);
  check_assignments(indices, "indices", device);
  Dtype key_dtype = F32;
  if (key.has_value()) {
    key_dtype = dtype_of(*key, "priority");
    check_argument(*key, "priority", indices.sizes(), key->scalar_type(), device);
  }
  Tensor positions = new_like(indices), counts = new_tensor(indices, {num_experts}, at::kLong);
  Tensor demand = new_like(counts);
  check_values(indices, "indices", 0, num_experts, "the number of experts");
  const Places c{indices.const_data_ptr<int64_t>(),
                 positions.mutable_data_ptr<int64_t>(),
                 counts.mutable_data_ptr<int64_t>(),
                 demand.mutable_data_ptr<int64_t>(),
                 indices.size(0),
                 indices.size(1),
                 num_experts,
                 capacity.value_or(-1),
                 choices_first,
                 key.has_value() ? key->const_data_ptr() : nullptr,
                 key_dtype};
#if defined(ZOO_CUDA)
  const KernelScratch<int64_t> taken(indices, ceil_div(indices.numel(), PLACES_PART) * num_experts);
  const bool by_key = key.has_value() && capacity.has_value();
  const KernelScratch<int64_t> order(indices, by_key ? num_experts + indices.numel() : 0);
  ZOO_LAUNCH(positions_in_expert, indices, c, taken.data(), order.data());
#else
  ZOO_LAUNCH(positions_in_expert, indices, c);
#endif
  return {positions, counts, demand};
}

Tensor there(const Tensor& x, const Tensor& rows, int64_t num_rows) {
  const at::Device device = device_of(x);
  check_matrix(x, "x", device);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == x.size(0), "rows has shape ", rows.sizes(), "; it must be (",
                    x.size(0), ", k), as x has shape ", x.sizes(), ".");
  TORCH_CHECK_VALUE(num_rows >= 0, "num_rows is ", num_rows, "; it must not be negative.");
  check_assignments(rows, "rows", device);
  Tensor y = new_tensor(x, {num_rows, x.size(1)}, x.scalar_type());
  const KernelScratch<int64_t> source(rows, num_rows);
  invert(rows, num_rows, source.data());
  const Permute c{x.const_data_ptr(),
                  y.mutable_data_ptr(),
                  source.data(),
                  rows.size(1),
                  num_rows,
                  x.size(1) * int64_t(x.element_size()),
                  rows.const_data_ptr<int64_t>(),
                  x.size(0)};
  ZOO_LAUNCH(permute, x, c);
  return y;
}

Tensor back(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weights) {
  const at::Device device = device_of(y);
  check_matrix(y, "y", device);
  check_assignments(rows, "rows", device);
  Unpermute c{};
  if (weights.has_value()) {
    c.weight_dtype = dtype_of(*weights, "weights");
    check_argument(*weights, "weights", rows.sizes(), weights->scalar_type(), device);
    c.weights = weights->const_data_ptr();
  }
  c.tokens = rows.size(0);
  c.choices = rows.size(1);
  c.num_rows = y.size(0);
  c.dim = y.size(1);
  c.dtype = dtype_of(y, "y");
  c.y = y.const_data_ptr();
  c.rows = rows.const_data_ptr<int64_t>();
  Tensor out = new_tensor(y, {c.tokens, c.dim}, y.scalar_type());
  c.out = out.mutable_data_ptr();
  check_values(rows, "rows", -1, c.num_rows, "the number of rows");
  ZOO_LAUNCH(unpermute, y, c);
  return out;
}

std::tuple<Tensor, Tensor> back_backward(const Tensor& grad_out, const Tensor& y, const Tensor& rows,
                                         const Tensor& weights) {
  const at::Device device = device_of(y);
  check_matrix(y, "y", device);
  check_assignments(rows, "rows", device);
  check_argument(grad_out, "grad_out", {rows.size(0), y.size(1)}, y.scalar_type(), device);
  const Dtype weight_dtype = dtype_of(weights, "weights");
  check_argument(weights, "weights", rows.sizes(), weights.scalar_type(), device);
  Tensor grad_y = new_like(y), grad_weights = new_like(weights);
  const KernelScratch<int64_t> source(rows, y.size(0));
  invert(rows, y.size(0), source.data());
  const UnpermuteBackward c{grad_out.const_data_ptr(),
                            y.const_data_ptr(),
                            weights.const_data_ptr(),
                            source.data(),
                            grad_y.mutable_data_ptr(),
                            grad_weights.mutable_data_ptr(),
                            rows.size(0),
                            rows.size(1),
                            y.size(0),
                            y.size(1),
                            dtype_of(y, "y"),
                            weight_dtype};
  ZOO_LAUNCH(unpermute_backward, y, c);
  return {grad_y, grad_weights};
}

}  // namespace

ZOO_OPERATORS(define) {
  define("top_k_gate(Tensor logits, int k, bool renormalise) -> (Tensor, Tensor)", gate);
  define("top_k_gate_backward(Tensor grad_probabilities, Tensor logits, Tensor indices, bool renormalise) -> Tensor",
         gate_backward);
  define(
      "positions_in_expert(Tensor indices, int num_experts, int? capacity, bool choices_first, Tensor? key) -> "
      "(Tensor, Tensor, Tensor)",
      places);
  define("permute(Tensor x, Tensor rows, SymInt num_rows) -> Tensor", there);
  define("unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor", back);
  define("unpermute_backward(Tensor grad_out, Tensor y, Tensor rows, Tensor weights) -> (Tensor, Tensor)",
         back_backward);
}

}  // namespace zoo
