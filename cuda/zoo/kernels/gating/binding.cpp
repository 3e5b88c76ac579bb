// Gating as operators of torch.
#include <vector>

#include "binding.h"
#include "gating_cpu.h"

namespace zoo {
namespace {

using at::Tensor;

// All in [low, high).
void check_values(const Tensor& t, const char* what, int64_t low, int64_t high, const char* limit) {
  const int64_t* numbers = t.const_data_ptr<int64_t>();
  const int64_t at = first_outside(numbers, t.numel(), low, high);
  if (at < 0) return;
  const int64_t k = t.size(1);
  TORCH_CHECK_VALUE(false, what, "[", at / k, ", ", at % k, "] is ", numbers[at], "; it must be at least ", low,
                    " and less than ", limit, ", here ", high, ".");
}

std::vector<int64_t> inverse_of_rows(const Tensor& rows, int64_t num_rows) {
  check_values(rows, "rows", -1, num_rows, "the number of rows");
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

void gate(const Gate& c, const Tensor&) { gate_cpu(c); }

void gate_backward(const GateBackward& c, const Tensor& indices) {
  check_values(indices, "indices", 0, c.experts, "the number of experts");
  gate_backward_cpu(c);
}

void places(const Places& c, const Tensor& indices) {
  check_values(indices, "indices", 0, c.experts, "the number of experts");
  places_cpu(c);
}

void there(Permute c, const Tensor& rows) {
  const std::vector<int64_t> source = inverse_of_rows(rows, c.rows);
  c.source = source.data();
  permute_cpu(c);
}

void back(const Unpermute& c, const Tensor& rows) {
  check_values(rows, "rows", -1, c.num_rows, "the number of rows");
  unpermute_cpu(c);
}

void back_backward(UnpermuteBackward c, const Tensor& rows) {
  const std::vector<int64_t> source = inverse_of_rows(rows, c.rows);
  c.source = source.data();
  unpermute_backward_cpu(c);
}

std::tuple<Tensor, Tensor> top_k_gate_(const Tensor& logits, int64_t k, bool renormalise) {
  return top_k_gate(logits, k, renormalise, at::kCPU, gate);
}

Tensor top_k_gate_backward_(const Tensor& grad_probabilities, const Tensor& logits, const Tensor& indices,
                            bool renormalise) {
  return top_k_gate_backward(grad_probabilities, logits, indices, renormalise, at::kCPU, gate_backward);
}

std::tuple<Tensor, Tensor, Tensor> positions_in_expert_(const Tensor& indices, int64_t num_experts,
                                                        std::optional<int64_t> capacity, bool choices_first,
                                                        const std::optional<Tensor>& key) {
  return positions_in_expert(indices, num_experts, capacity, choices_first, key, at::kCPU, places);
}

Tensor permute_(const Tensor& x, const Tensor& rows, int64_t num_rows) {
  return permute(x, rows, num_rows, at::kCPU, there);
}

Tensor unpermute_(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weights) {
  return unpermute(y, rows, weights, at::kCPU, back);
}

std::tuple<Tensor, Tensor> unpermute_backward_(const Tensor& grad_out, const Tensor& y, const Tensor& rows,
                                               const Tensor& weights) {
  return unpermute_backward(grad_out, y, rows, weights, at::kCPU, back_backward);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def("top_k_gate(Tensor logits, int k, bool renormalise) -> (Tensor, Tensor)");
  m.def("top_k_gate_backward(Tensor grad_probabilities, Tensor logits, Tensor indices, bool renormalise) -> Tensor");
  m.def(
      "positions_in_expert(Tensor indices, int num_experts, int? capacity, bool choices_first, Tensor? key) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("permute(Tensor x, Tensor rows, SymInt num_rows) -> Tensor");
  m.def("unpermute(Tensor y, Tensor rows, Tensor? weights) -> Tensor");
  m.def("unpermute_backward(Tensor grad_out, Tensor y, Tensor rows, Tensor weights) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("top_k_gate", &top_k_gate_);
  m.impl("top_k_gate_backward", &top_k_gate_backward_);
  m.impl("positions_in_expert", &positions_in_expert_);
  m.impl("permute", &permute_);
  m.impl("unpermute", &unpermute_);
  m.impl("unpermute_backward", &unpermute_backward_);
}

}  // namespace zoo
