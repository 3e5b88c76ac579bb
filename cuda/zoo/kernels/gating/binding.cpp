// Gating as operators of torch. The only file of this folder that knows about tensors.
#include <tuple>
#include <vector>

#include "../common/arguments.h"
#include "gating_cpu.h"

namespace zoo {
namespace {

using at::Tensor;

void check_matrix(const Tensor& t, const char* what) {
  dtype_of(t, what);
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has shape ", t.sizes(), "; it must have 2 dims.");
  check_memory(t, what);
}

// int64 (T, k), of numbers in [low, high), unless high is negative.
void check_assignments(const Tensor& t, const char* what, int64_t low, int64_t high, const char* limit) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kLong, what, " is ", t.scalar_type(), "; it must be torch.int64.");
  TORCH_CHECK_VALUE(t.dim() == 2, what, " has shape ", t.sizes(), "; it must have 2 dims.");
  check_memory(t, what);
  const int64_t* numbers = t.const_data_ptr<int64_t>();
  const int64_t at = first_outside(numbers, t.numel(), low, high);
  if (at < 0) return;
  const int64_t k = t.size(1);
  TORCH_CHECK_VALUE(false, what, "[", at / k, ", ", at % k, "] is ", numbers[at], "; it must be at least ", low,
                    " and less than ", limit, ", here ", high, ".");
}

std::vector<int64_t> inverse_of_rows(const Tensor& rows, int64_t num_rows) {
  TORCH_CHECK_VALUE(num_rows >= 0, "num_rows is ", num_rows, "; it must not be negative.");
  check_assignments(rows, "rows", -1, num_rows, "the number of rows");
  std::vector<int64_t> source(static_cast<size_t>(num_rows));
  const int64_t* numbers = rows.const_data_ptr<int64_t>();
  const int64_t at = invert(numbers, rows.numel(), num_rows, source.data());
  if (at >= 0) {
    const int64_t k = rows.size(1);
    TORCH_CHECK_VALUE(false, "rows[", at / k, ", ", at % k, "] is ", numbers[at],
                      ", which an assignment before it has already; each must have a row of its own.");
  }
  return source;
}

Tensor new_tensor(const Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return like.new_empty(shape, like.options().dtype(dtype).requires_grad(false));
}

std::tuple<Tensor, Tensor> top_k_gate(const Tensor& logits, int64_t k, bool renormalise) {
  check_matrix(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= experts, "k is ", k, "; it must be between 1 and the number of experts, here ",
                    experts, ".");
  Tensor probabilities = new_tensor(logits, {tokens, k}, at::kFloat);
  Tensor indices = new_tensor(logits, {tokens, k}, at::kLong);
  gate_cpu(Gate{logits.const_data_ptr(), indices.mutable_data_ptr<int64_t>(), probabilities.mutable_data_ptr<float>(),
                tokens, experts, k, renormalise, dtype_of(logits, "logits")});
  return {probabilities, indices};
}

Tensor top_k_gate_backward(const Tensor& grad_probabilities, const Tensor& logits, const Tensor& indices,
                           bool renormalise) {
  check_matrix(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check_assignments(indices, "indices", 0, experts, "the number of experts");
  TORCH_CHECK_VALUE(indices.size(0) == tokens && indices.size(1) <= experts, "indices has shape ", indices.sizes(),
                    "; it must be (", tokens, ", at most ", experts, ").");
  check_argument(grad_probabilities, "grad_probabilities", indices.sizes(), at::kFloat);
  Tensor grad_logits = new_like(logits);
  gate_backward_cpu(GateBackward{grad_probabilities.const_data_ptr<float>(), logits.const_data_ptr(),
                                 indices.const_data_ptr<int64_t>(), grad_logits.mutable_data_ptr(), tokens, experts,
                                 indices.size(1), renormalise, dtype_of(logits, "logits")});
  return grad_logits;
}

std::tuple<Tensor, Tensor, Tensor> positions_in_expert(const Tensor& indices, int64_t num_experts,
                                                       std::optional<int64_t> capacity, bool choices_first) {
  TORCH_CHECK_VALUE(num_experts >= 1, "num_experts is ", num_experts, "; it must be at least 1.");
  TORCH_CHECK_VALUE(!capacity || *capacity >= 0, "capacity is ", *capacity, "; it must not be negative.");
  check_assignments(indices, "indices", 0, num_experts, "the number of experts");
  Tensor positions = new_like(indices), counts = new_tensor(indices, {num_experts}, at::kLong);
  Tensor demand = new_like(counts);
  places_cpu(Places{indices.const_data_ptr<int64_t>(), positions.mutable_data_ptr<int64_t>(),
                    counts.mutable_data_ptr<int64_t>(), demand.mutable_data_ptr<int64_t>(), indices.size(0),
                    indices.size(1), num_experts, capacity.value_or(-1), choices_first});
  return {positions, counts, demand};
}

void check_tokens(const Tensor& rows, const Tensor& x, const char* what) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(0) == x.size(0), "rows has shape ", rows.sizes(), "; it must be (",
                    x.size(0), ", k), as ", what, " has shape ", x.sizes(), ".");
}

Tensor permute(const Tensor& x, const Tensor& rows, int64_t num_rows) {
  check_matrix(x, "x");
  check_tokens(rows, x, "x");
  const std::vector<int64_t> source = inverse_of_rows(rows, num_rows);
  Tensor y = new_tensor(x, {num_rows, x.size(1)}, x.scalar_type());
  permute_cpu(Permute{x.const_data_ptr(), y.mutable_data_ptr(), source.data(), rows.size(1), num_rows,
                      x.size(1) * int64_t(x.element_size())});
  return y;
}

Tensor unpermute(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weights) {
  check_matrix(y, "y");
  check_assignments(rows, "rows", -1, y.size(0), "the number of rows");
  Unpermute c{};
  if (weights.has_value()) {
    c.weight_dtype = dtype_of(*weights, "weights");
    check_argument(*weights, "weights", rows.sizes(), weights->scalar_type());
    c.weights = weights->const_data_ptr();
  }
  c.tokens = rows.size(0);
  c.choices = rows.size(1);
  c.dim = y.size(1);
  c.dtype = dtype_of(y, "y");
  c.y = y.const_data_ptr();
  c.rows = rows.const_data_ptr<int64_t>();
  Tensor out = new_tensor(y, {c.tokens, c.dim}, y.scalar_type());
  c.out = out.mutable_data_ptr();
  unpermute_cpu(c);
  return out;
}

std::tuple<Tensor, Tensor> unpermute_backward(const Tensor& grad_out, const Tensor& y, const Tensor& rows,
                                              const Tensor& weights) {
  check_matrix(y, "y");
  const std::vector<int64_t> source = inverse_of_rows(rows, y.size(0));
  check_argument(grad_out, "grad_out", {rows.size(0), y.size(1)}, y.scalar_type());
  const Dtype weight_dtype = dtype_of(weights, "weights");
  check_argument(weights, "weights", rows.sizes(), weights.scalar_type());
  Tensor grad_y = new_like(y), grad_weights = new_like(weights);
  unpermute_backward_cpu(UnpermuteBackward{grad_out.const_data_ptr(), y.const_data_ptr(), weights.const_data_ptr(),
                                           source.data(), grad_y.mutable_data_ptr(), grad_weights.mutable_data_ptr(),
                                           rows.size(0), rows.size(1), y.size(0), y.size(1), dtype_of(y, "y"),
                                           weight_dtype});
  return {grad_y, grad_weights};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("top_k_gate(Tensor logits, int k, bool renormalise) -> (Tensor, Tensor)");
  m.def("top_k_gate_backward(Tensor grad_probabilities, Tensor logits, Tensor indices, bool renormalise) -> Tensor");
  m.def(
      "positions_in_expert(Tensor indices, int num_experts, int? capacity, bool choices_first) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("permute(Tensor x, Tensor rows, SymInt num_rows) -> Tensor");
  m.def("unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor");
  m.def("unpermute_backward(Tensor grad_out, Tensor y, Tensor rows, Tensor weights) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("top_k_gate", &top_k_gate);
  m.impl("top_k_gate_backward", &top_k_gate_backward);
  m.impl("positions_in_expert", &positions_in_expert);
  m.impl("permute", &permute);
  m.impl("unpermute", &unpermute);
  m.impl("unpermute_backward", &unpermute_backward);
}

}  // namespace zoo
