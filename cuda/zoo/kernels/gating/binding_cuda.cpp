// Gating on CUDA as operators of torch. Nothing here waits for the GPU: gating_cuda.h has what becomes of indices and rows
// that the CPU would refuse.
#include "../common/cuda_call.h"
#include "binding.h"
#include "gating_cuda.h"

namespace zoo {
namespace {

using at::Tensor;

void gate(const Gate& c, const Tensor& logits) {
  const CudaCall call("top_k_gate", logits);
  call.check(zoo_top_k_gate_cuda(&c, call.stream()));
}

void gate_backward(const GateBackward& c, const Tensor& indices) {
  const CudaCall call("top_k_gate_backward", indices);
  call.check(zoo_top_k_gate_backward_cuda(&c, call.stream()));
}

void places(const Places& c, const Tensor& indices) {
  const CudaCall call("positions_in_expert", indices);
  const int64_t parts = (indices.numel() + PLACES_PART - 1) / PLACES_PART;
  Tensor taken = call.scratch(parts * c.experts, at::kLong);
  const bool by_key = c.key != nullptr && c.capacity >= 0;
  Tensor order = call.scratch(by_key ? c.experts + indices.numel() : 0, at::kLong);
  call.check(zoo_positions_in_expert_cuda(&c, taken.mutable_data_ptr<int64_t>(), order.mutable_data_ptr<int64_t>(),
                                          call.stream()));
}

// `source` for a call; its memory is used again in the order of the stream.
Tensor inverse_of_rows(const CudaCall& call, const Tensor& rows, int64_t num_rows) {
  Tensor source = call.scratch(num_rows, at::kLong);
  call.check(zoo_invert_rows_cuda(rows.const_data_ptr<int64_t>(), rows.numel(), num_rows,
                                  source.mutable_data_ptr<int64_t>(), call.stream()));
  return source;
}

void there(Permute c, const Tensor& rows) {
  const CudaCall call("permute", rows);
  const Tensor source = inverse_of_rows(call, rows, c.rows);
  c.source = source.const_data_ptr<int64_t>();
  call.check(zoo_permute_cuda(&c, call.stream()));
}

void back(const Unpermute& c, const Tensor& rows) {
  const CudaCall call("unpermute", rows);
  call.check(zoo_unpermute_cuda(&c, call.stream()));
}

void back_backward(UnpermuteBackward c, const Tensor& rows) {
  const CudaCall call("unpermute_backward", rows);
  const Tensor source = inverse_of_rows(call, rows, c.rows);
  c.source = source.const_data_ptr<int64_t>();
  call.check(zoo_unpermute_backward_cuda(&c, call.stream()));
}

std::tuple<Tensor, Tensor> top_k_gate_(const Tensor& logits, int64_t k, bool renormalise) {
  return top_k_gate(logits, k, renormalise, at::kCUDA, gate);
}

Tensor top_k_gate_backward_(const Tensor& grad_probabilities, const Tensor& logits, const Tensor& indices,
                            bool renormalise) {
  return top_k_gate_backward(grad_probabilities, logits, indices, renormalise, at::kCUDA, gate_backward);
}

std::tuple<Tensor, Tensor, Tensor> positions_in_expert_(const Tensor& indices, int64_t num_experts,
                                                        std::optional<int64_t> capacity, bool choices_first,
                                                        const std::optional<Tensor>& key) {
  return positions_in_expert(indices, num_experts, capacity, choices_first, key, at::kCUDA, places);
}

Tensor permute_(const Tensor& x, const Tensor& rows, int64_t num_rows) {
  return permute(x, rows, num_rows, at::kCUDA, there);
}

Tensor unpermute_(const Tensor& y, const Tensor& rows, const std::optional<Tensor>& weights) {
  return unpermute(y, rows, weights, at::kCUDA, back);
}

std::tuple<Tensor, Tensor> unpermute_backward_(const Tensor& grad_out, const Tensor& y, const Tensor& rows,
                                               const Tensor& weights) {
  return unpermute_backward(grad_out, y, rows, weights, at::kCUDA, back_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("top_k_gate", &top_k_gate_);
  m.impl("top_k_gate_backward", &top_k_gate_backward_);
  m.impl("positions_in_expert", &positions_in_expert_);
  m.impl("permute", &permute_);
  m.impl("unpermute", &unpermute_);
  m.impl("unpermute_backward", &unpermute_backward_);
}

}  // namespace zoo
