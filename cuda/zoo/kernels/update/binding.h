// What the bindings of the update on CPUs and on CUDA share: lists of tensors as rows, and the checks.
#pragma once

#include <array>
#include <vector>

#include "../common/checks.h"
#include "update.h"

namespace zoo {

inline constexpr const char* STATE_NAMES[MAX_STATES] = {"states0", "states1", "states2"};

inline Scalars scalars_of(c10::ArrayRef<double> values) {
  TORCH_CHECK_VALUE(values.size() == NUM_SCALARS, "scalars has ", values.size(), " numbers; it takes ", NUM_SCALARS, ".");
  std::array<float, NUM_SCALARS> f;
  for (size_t i = 0; i < NUM_SCALARS; ++i) f[i] = float(values[i]);
  return Scalars{f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10]};
}

inline void check_length(size_t found, size_t wanted, const char* what) {
  TORCH_CHECK_VALUE(found == wanted, what, " has ", found, " tensors and params has ", wanted, "; they must be as many.");
}

// Lists of tensors as rows, checked.
class Table {
 public:
  enum Access { READ, WRITE, OWN };  // OWN: written, but known to nobody's graph, so that its version may stay

  Table(int64_t rule, int64_t flags, const at::Device& device, Access params = WRITE, Access states = WRITE)
      : num_states_(num_states(int(rule), int(flags))), device_(device), params_(params), states_(states) {}

  void check_lists(at::TensorList params, const std::array<at::TensorList, MAX_STATES>& states, at::TensorList masters) {
    for (int k = 0; k < MAX_STATES; ++k)
      check_length(states[size_t(k)].size(), k < num_states_ ? params.size() : 0, STATE_NAMES[k]);
    check_length(masters.size(), masters.empty() ? 0 : params.size(), "masters");
    rows.reserve(params.size());
  }

  // `index` names the row in messages. grad may be null: the second pass of LAMB needs none.
  void add(int64_t index, const at::Tensor& param, const at::Tensor* grad,
           const std::array<const at::Tensor*, MAX_STATES>& states, const at::Tensor* master) {
    const int64_t n = param.numel();
    if (rows.empty()) {
      formats.param = dtype_of(param, "params", index);
      formats.grad = grad != nullptr ? dtype_of(*grad, "grads", index) : F32;
      formats.state = states[0] != nullptr ? dtype_of(*states[0], STATE_NAMES[0], index) : F32;
      TORCH_CHECK_VALUE(formats.state != F16, "states0[", index, "] is torch.float16, whose range is too small for "
                        "squares; states are torch.float32 or torch.bfloat16.");
    }
    check_tensor(param, "params", index, n, formats.param, device_);
    Row row{};
    row.n = n;
    row.ratio = 1.0f;
    row.param = address(param, params_);
    if (grad != nullptr) {
      check_tensor(*grad, "grads", index, n, formats.grad, device_);
      row.grad = grad->const_data_ptr();
    }
    for (int k = 0; k < MAX_STATES; ++k) {
      const at::Tensor* state = states[size_t(k)];
      if (state == nullptr) continue;
      check_tensor(*state, STATE_NAMES[k], index, n, formats.state, device_);
      row.state[k] = address(*state, states_);
    }
    if (master != nullptr) {
      check_tensor(*master, "masters", index, n, F32, device_);
      row.master = address(*master, params_ == WRITE && states_ == OWN ? OWN : params_);
    }
    rows.push_back(row);
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

inline void fill(Table& table, at::TensorList params, const at::TensorList* grads,
          const std::array<at::TensorList, MAX_STATES>& states, at::TensorList masters) {
  if (grads != nullptr) check_length(grads->size(), params.size(), "grads");
  table.check_lists(params, states, masters);
  for (size_t i = 0; i < params.size(); ++i) {
    std::array<const at::Tensor*, MAX_STATES> s{};
    for (size_t k = 0; k < MAX_STATES; ++k) s[k] = states[k].empty() ? nullptr : &states[k][i];
    table.add(int64_t(i), params[i], grads != nullptr ? &(*grads)[i] : nullptr, s,
              masters.empty() ? nullptr : &masters[i]);
  }
}

inline void check_lamb(const Table& table, int64_t flags) {
  TORCH_CHECK_VALUE((flags & ~int64_t(COUPLED | EPS_INSIDE)) == 0, "LAMB has no flags ", flags, "; see update.h.");
  TORCH_CHECK_VALUE(table.formats.state == F32, "the states of LAMB are torch.bfloat16; they must be torch.float32, so "
                    "that both passes see the same direction.");
}

inline at::Tensor new_norms(int64_t rows, const at::Tensor& like) {
  return like.new_empty({rows, 2}, like.options().dtype(at::kDouble).requires_grad(false));
}

// launch(scalars, table, params[0]) returns whether the rule has these flags.
template <class Launch>
void update(int64_t rule, int64_t flags, at::TensorList params, at::TensorList grads,
            const std::array<at::TensorList, MAX_STATES>& states, at::TensorList masters, c10::ArrayRef<double> scalars,
            at::DeviceType kind, const Launch& launch) {
  Table table(rule, flags, device_of(params[0], kind));
  fill(table, params, &grads, states, masters);
  TORCH_CHECK_VALUE(launch(scalars_of(scalars), table, params[0]), "rule ", rule, " has no flags ", flags,
                    "; see update.h.");
}

// launch(scalars, table, norms, params[0])
template <class Launch>
at::Tensor lamb_direction(int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                          at::TensorList exp_avg_sqs, at::TensorList masters, c10::ArrayRef<double> scalars,
                          at::DeviceType kind, const Launch& launch) {
  Table table(LAMB, flags, device_of(params[0], kind), /*params=*/Table::READ);
  fill(table, params, &grads, {exp_avgs, exp_avg_sqs, {}}, masters);
  check_lamb(table, flags);
  at::Tensor norms = new_norms(int64_t(table.rows.size()), params[0]);
  launch(scalars_of(scalars), table, norms.mutable_data_ptr<double>(), params[0]);
  return norms;
}

// launch(scalars, table, ratios, params[0]); the ratios are where the tensors are
template <class Launch>
void lamb_apply(int64_t flags, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList masters, const at::Tensor& ratios, c10::ArrayRef<double> scalars, at::DeviceType kind,
                const Launch& launch) {
  const at::Device device = device_of(params[0], kind);
  Table table(LAMB, flags, device, /*params=*/Table::WRITE, /*states=*/Table::READ);
  fill(table, params, nullptr, {exp_avgs, exp_avg_sqs, {}}, masters);
  check_lamb(table, flags);
  check_tensor(ratios, "ratios", 0, int64_t(params.size()), F32, device);
  launch(scalars_of(scalars), table, ratios.const_data_ptr<float>(), params[0]);
}

}  // namespace zoo
