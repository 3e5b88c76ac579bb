// What the bindings of gating on CPUs and on CUDA share: the checks of dtypes, shapes, devices and options, and the
// results. Those of the values of indices and rows are in the CPU's launches: on CUDA they would wait for the GPU.
#pragma once

#include <tuple>

#include "../common/arguments.h"
#include "gating.h"

namespace zoo {

inline void check_matrix(const at::Tensor& t, const char* what, const at::Device& device) {
  dtype_of(t, what);
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has shape ", t.sizes(), "; it must have 2 dims.");
  check_memory(t, what, device);
}

// int64 (T, k).
inline void check_assignments(const at::Tensor& t, const char* what, const at::Device& device) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kLong, what, " is ", t.scalar_type(), "; it must be torch.int64.");
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has shape ", t.sizes(), "; it must have 2 dims.");
  check_memory(t, what, device);
}

inline at::Tensor new_tensor(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return like.new_empty(shape, like.options().dtype(dtype).requires_grad(false));
}

// launch(c, logits)
template <class Launch>
std::tuple<at::Tensor, at::Tensor> top_k_gate(const at::Tensor& logits, int64_t k, bool renormalise,
                                              at::DeviceType kind, const Launch& launch) {
  check_matrix(logits, "logits", device_of(logits, kind));
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= experts, "k is ", k, "; it must be between 1 and the number of experts, here ",
                    experts, ".");
  at::Tensor probabilities = new_tensor(logits, {tokens, k}, at::kFloat);
  at::Tensor indices = new_tensor(logits, {tokens, k}, at::kLong);
  launch(Gate{logits.const_data_ptr(), indices.mutable_data_ptr<int64_t>(), probabilities.mutable_data_ptr<float>(),
              tokens, experts, k, renormalise, dtype_of(logits, "logits")}, logits);
  return {probabilities, indices};
}

// launch(c, indices)
template <class Launch>
at::Tensor top_k_gate_backward(const at::Tensor& grad_probabilities, const at::Tensor& logits,
                               const at::Tensor& indices, bool renormalise, at::DeviceType kind,
                               const Launch& launch) {
  const at::Device device = device_of(logits, kind);
  check_matrix(logits, "logits", device);
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check_assignments(indices, "indices", device);
  TORCH_CHECK_VALUE(indices.size(0) == tokens && indices.size(1) <= experts, "indices has shape ", indices.sizes(),
                    "; it must be (", tokens, ", at most ", experts, ").");
  check_argument(grad_probabilities, "grad_probabilities", indices.sizes(), at::kFloat, device);
  at::Tensor grad_logits = new_like(logits);
  launch(GateBackward{grad_probabilities.const_data_ptr<float>(), logits.const_data_ptr(),
                      indices.const_data_ptr<int64_t>(), grad_logits.mutable_data_ptr(), tokens, experts,
                      indices.size(1), renormalise, dtype_of(logits, "logits")}, indices);
  return grad_logits;
}

// launch(c, indices)
template <class Launch>
std::tuple<at::Tensor, at::Tensor, at::Tensor> positions_in_expert(const at::Tensor& indices, int64_t num_experts,
                                                                   std::optional<int64_t> capacity, bool choices_first,
                                                                   const std::optional<at::Tensor>& key,
                                                                   at::DeviceType kind, const Launch& launch) {
  TORCH_CHECK_VALUE(num_experts >= 1, "num_experts is ", num_experts, "; it must be at least 1.");
  TORCH_CHECK_VALUE(!capacity || *capacity >= 0, "capacity is ", *capacity, "; it must not be negative.");
  const at::Device device = device_of(indices, kind);
  check_assignments(indices, "indices", device);
  Dtype key_dtype = F32;
  if (key.has_value()) {
    key_dtype = dtype_of(*key, "priority");
    check_argument(*key, "priority", indices.sizes(), key->scalar_type(), device);
  }
  at::Tensor positions = new_like(indices), counts = new_tensor(indices, {num_experts}, at::kLong);
  at::Tensor demand = new_like(counts);
  launch(Places{indices.const_data_ptr<int64_t>(), positions.mutable_data_ptr<int64_t>(),
                counts.mutable_data_ptr<int64_t>(), demand.mutable_data_ptr<int64_t>(), indices.size(0),
                indices.size(1), num_experts, capacity.value_or(-1), choices_first,
                key.has_value() ? key->const_data_ptr() : nullptr, key_dtype}, indices);
  return {positions, counts, demand};
}

// launch(c, rows), which sets c.source
template <class Launch>
at::Tensor permute(const at::Tensor& x, const at::Tensor& rows, int64_t num_rows, at::DeviceType kind,
                   const Launch& launch) {
  const at::Device device = device_of(x, kind);
  check_matrix(x, "x", device);
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == x.size(0), "rows has shape ", rows.sizes(), "; it must be (",
                    x.size(0), ", k), as x has shape ", x.sizes(), ".");
  TORCH_CHECK_VALUE(num_rows >= 0, "num_rows is ", num_rows, "; it must not be negative.");
  check_assignments(rows, "rows", device);
  at::Tensor y = new_tensor(x, {num_rows, x.size(1)}, x.scalar_type());
  launch(Permute{x.const_data_ptr(), y.mutable_data_ptr(), nullptr, rows.size(1), num_rows,
                 x.size(1) * int64_t(x.element_size())}, rows);
  return y;
}

// launch(c, rows)
template <class Launch>
at::Tensor unpermute(const at::Tensor& y, const at::Tensor& rows, const std::optional<at::Tensor>& weights,
                     at::DeviceType kind, const Launch& launch) {
  const at::Device device = device_of(y, kind);
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
  at::Tensor out = new_tensor(y, {c.tokens, c.dim}, y.scalar_type());
  c.out = out.mutable_data_ptr();
  launch(c, rows);
  return out;
}

// launch(c, rows), which sets c.source
template <class Launch>
std::tuple<at::Tensor, at::Tensor> unpermute_backward(const at::Tensor& grad_out, const at::Tensor& y,
                                                      const at::Tensor& rows, const at::Tensor& weights,
                                                      at::DeviceType kind, const Launch& launch) {
  const at::Device device = device_of(y, kind);
  check_matrix(y, "y", device);
  check_assignments(rows, "rows", device);
  check_argument(grad_out, "grad_out", {rows.size(0), y.size(1)}, y.scalar_type(), device);
  const Dtype weight_dtype = dtype_of(weights, "weights");
  check_argument(weights, "weights", rows.sizes(), weights.scalar_type(), device);
  at::Tensor grad_y = new_like(y), grad_weights = new_like(weights);
  launch(UnpermuteBackward{grad_out.const_data_ptr(), y.const_data_ptr(), weights.const_data_ptr(), nullptr,
                           grad_y.mutable_data_ptr(), grad_weights.mutable_data_ptr(), rows.size(0), rows.size(1),
                           y.size(0), y.size(1), dtype_of(y, "y"), weight_dtype}, rows);
  return {grad_y, grad_weights};
}

}  // namespace zoo
