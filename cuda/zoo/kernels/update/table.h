// Lists of tensors as rows of the update, checked: what the operators and the plan share.
#pragma once

#include <array>
#include <vector>

#include "../common/checks.h"
#include "update.h"

namespace zoo {

constexpr const char* STATE_NAMES[MAX_STATES] = {"states0", "states1", "states2"};

inline void check_length(size_t found, size_t wanted, const char* what) {
  TORCH_CHECK_VALUE(found == wanted, what, " has ", found, " tensors and params has ", wanted,
                    "; they must be as many.");
}

// Lists of tensors as rows, checked.
class Table {
 public:
  enum Access { READ, WRITE, OWN };  // OWN: written, but known to nobody's graph, so that its version may stay

  Table(int num_states, const at::Device& device, Access params = WRITE, Access states = WRITE)
      : num_states_(num_states), device_(device), params_(params), states_(states) {}

  int64_t size() const { return int64_t(rows.size()); }

  void check_lists(at::TensorList params, const std::array<at::TensorList, MAX_STATES>& states,
                   at::TensorList masters) {
    for (int k = 0; k < MAX_STATES; ++k)
      check_length(states[size_t(k)].size(), k < num_states_ ? params.size() : 0, STATE_NAMES[k]);
    check_length(masters.size(), masters.empty() ? 0 : params.size(), "masters");
    rows.resize(params.size());
  }

  void set(int64_t index, const at::Tensor& param, const at::Tensor* grad,
           const std::array<const at::Tensor*, MAX_STATES>& states, const at::Tensor* master) {
    rows[size_t(index)] = row(index, param, grad, states, master);
  }

  // Row `index`, which names it in messages too; row 0 first, it decides the formats. grad may be null: the second pass
  // of LAMB needs none.
  Row row(int64_t index, const at::Tensor& param, const at::Tensor* grad,
          const std::array<const at::Tensor*, MAX_STATES>& states, const at::Tensor* master) {
    const int64_t n = param.numel();
    if (index == 0) {
      formats.param = dtype_of(param, {"params", index});
      formats.grad = grad != nullptr ? dtype_of(*grad, {"grads", index}) : F32;
      formats.state = states[0] != nullptr ? dtype_of(*states[0], {STATE_NAMES[0], index}) : F32;
      TORCH_CHECK_VALUE(formats.state != F16, "states0[", index,
                        "] is torch.float16, whose range is too small for "
                        "squares; states are torch.float32 or torch.bfloat16.");
    }
    check_tensor(param, {"params", index}, n, formats.param, device_);
    Row row{};
    row.n = n;
    row.ratio = 1.0f;
    row.param = address(param, params_);
    if (grad != nullptr) {
      check_tensor(*grad, {"grads", index}, n, formats.grad, device_);
      row.grad = grad->const_data_ptr();
    }
    for (int k = 0; k < MAX_STATES; ++k) {
      const at::Tensor* state = states[size_t(k)];
      if (state == nullptr) continue;
      check_tensor(*state, {STATE_NAMES[k], index}, n, formats.state, device_);
      row.state[k] = address(*state, states_);
    }
    if (master != nullptr) {
      check_tensor(*master, {"masters", index}, n, F32, device_);
      row.master = address(*master, params_ == WRITE && states_ == OWN ? OWN : params_);
    }
    return row;
  }

  std::vector<Row> rows;
  Formats formats{F32, F32, F32};

 private:
  static void* address(const at::Tensor& t, Access access) {
    return access == WRITE ? writable(t) : access == OWN ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr());
  }

  int num_states_;
  at::Device device_;
  Access params_, states_;
};

}  // namespace zoo
