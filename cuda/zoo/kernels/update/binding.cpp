// The update as operators of torch.
#include <algorithm>
#include <array>

#include "../common/operators.h"
#include "../common/squares.h"
#include "table.h"

namespace zoo {
namespace {

template <size_t N>
std::array<double, N> numbers_of(c10::ArrayRef<double> values, const char* what) {
  TORCH_CHECK_VALUE(values.size() == N, what, " has ", values.size(), " numbers; it takes ", N, ".");
  std::array<double, N> numbers;
  std::copy(values.begin(), values.end(), numbers.begin());
  return numbers;
}

// The scalars of a step: those of the list, or those in memory of the device, which only the CPU can read here.
struct StepScalars {
  StepScalars(c10::ArrayRef<double> values, const std::optional<at::Tensor>& tensor, const at::Device& device) {
    if (tensor.has_value()) {
      TORCH_CHECK_VALUE(values.empty(), "scalars has ", values.size(),
                        " numbers beside those on the device; give one of the two.");
      check_flat(*tensor, "device_scalars", NUM_SCALARS + 1, at::kDouble, device);
      there = tensor->const_data_ptr<double>();
#if !defined(ZOO_CUDA)
      given = rounded(there);
      skips = there[NUM_SCALARS] != 0;
#endif
    } else {
      given = rounded(numbers_of<NUM_SCALARS>(values, "scalars").data());
    }
  }

  Scalars given{};
  const double* there = nullptr;
  bool skips = false;
};

#if defined(ZOO_CUDA)
#define ZOO_SCALARS(STEP) STEP.given, STEP.there
#else
#define ZOO_SCALARS(STEP) STEP.given
#endif

void fill(Table& table, at::TensorList params, const at::TensorList* grads,
          const std::array<at::TensorList, MAX_STATES>& states, at::TensorList masters) {
  if (grads != nullptr) check_length(grads->size(), params.size(), "grads");
  table.check_lists(params, states, masters);
  for (size_t i = 0; i < params.size(); ++i) {
    std::array<const at::Tensor*, MAX_STATES> s{};
    for (size_t k = 0; k < MAX_STATES; ++k) s[k] = states[k].empty() ? nullptr : &states[k][i];
    table.set(int64_t(i), params[i], grads != nullptr ? &(*grads)[i] : nullptr, s,
              masters.empty() ? nullptr : &masters[i]);
  }
}

void check_lamb(const Table& table, int64_t flags) {
  TORCH_CHECK_VALUE((flags & ~int64_t(COUPLED | EPS_INSIDE)) == 0, "LAMB has no flags ", flags, "; see update.h.");
  TORCH_CHECK_VALUE(table.formats.state == F32,
                    "the states of LAMB are torch.bfloat16; they must be torch.float32, so "
                    "that both passes see the same direction.");
}

struct Nothing {
  template <int RULE, int FLAGS>
  void operator()() const {}
};

void check_rule(int64_t rule, int64_t flags) {
  TORCH_CHECK_VALUE(with_rule(int(rule), int(flags), Nothing{}), "rule ", rule, " has no flags ", flags,
                    "; see update.h.");
}

void update_lists(int64_t rule, int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList states0,
                  at::TensorList states1, at::TensorList states2, at::TensorList masters, c10::ArrayRef<double> scalars,
                  const std::optional<at::Tensor>& there) {
  const at::Tensor& first = head_of(params, "params");
  Table table(num_states(int(rule), int(flags)), device_of(first));
  fill(table, params, &grads, {states0, states1, states2}, masters);
  check_rule(rule, flags);
  const StepScalars step(scalars, there, device_of(first));
  if (step.skips) return;
  ZOO_LAUNCH(update, first, int(rule), int(flags), ZOO_SCALARS(step), table.formats, table.rows.data(), table.size());
}

at::Tensor direction_of_lists(int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                              at::TensorList exp_avg_sqs, at::TensorList masters, c10::ArrayRef<double> scalars,
                              const std::optional<at::Tensor>& there) {
  const at::Tensor& first = head_of(params, "params");
  Table table(num_states(int(LAMB), int(flags)), device_of(first), /*params=*/Table::READ);
  fill(table, params, &grads, {exp_avgs, exp_avg_sqs, {}}, masters);
  check_lamb(table, flags);
  at::Tensor norms = new_tensor(first, {table.size(), 2}, at::kDouble);
  const StepScalars step(scalars, there, device_of(first));
  if (step.skips) return norms.zero_();
  const KernelScratch<double> parts(first, 2 * square_parts(table.rows.data(), table.size()));
  ZOO_LAUNCH(lamb_direction, first, int(flags), ZOO_SCALARS(step), table.formats, table.rows.data(), table.size(),
             parts.data(), norms.mutable_data_ptr<double>());
  return norms;
}

void apply_to_lists(int64_t flags, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                    at::TensorList masters, const at::Tensor& ratios, c10::ArrayRef<double> scalars,
                    const std::optional<at::Tensor>& there) {
  const at::Tensor& first = head_of(params, "params");
  const at::Device device = device_of(first);
  Table table(num_states(int(LAMB), int(flags)), device, /*params=*/Table::WRITE, /*states=*/Table::READ);
  fill(table, params, nullptr, {exp_avgs, exp_avg_sqs, {}}, masters);
  check_lamb(table, flags);
  check_flat(ratios, "ratios", int64_t(params.size()), at::kFloat, device);
  const StepScalars step(scalars, there, device);
  if (step.skips) return;
  ZOO_LAUNCH(lamb_apply, first, int(flags), ZOO_SCALARS(step), table.formats, table.rows.data(), table.size(),
             ratios.const_data_ptr<float>());
}

Number number_of(const std::optional<at::Tensor>& t, const char* what, const at::Device& device) {
  if (!t.has_value()) return {nullptr, false};
  const bool wide = t->scalar_type() == at::kDouble;
  check_flat(*t, what, 1, wide ? at::kDouble : at::kFloat, device);
  return {t->const_data_ptr(), wide};
}

at::Tensor scalars_of_step(int64_t rule, int64_t flags, c10::ArrayRef<double> settings, const at::Tensor& steps,
                           const std::optional<at::Tensor>& lr, const std::optional<at::Tensor>& grad_scale,
                           const std::optional<at::Tensor>& loss_scale, const std::optional<at::Tensor>& found_inf) {
  const at::Device device = device_of(steps);
  TORCH_CHECK_VALUE(steps.numel() > 0, "steps has no elements; it has one for each parameter.");
  check_flat(steps, "steps", steps.numel(), at::kFloat, device);
  const auto s = numbers_of<NUM_SETTINGS>(settings, "settings");
  at::Tensor scalars = new_tensor(steps, {NUM_SCALARS + 1}, at::kDouble);
  Advance a{};
  a.rule = int32_t(rule);
  a.flags = int32_t(flags);
  a.settings = {s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9]};
  a.lr = number_of(lr, "lr", device);
  a.grad_scale = number_of(grad_scale, "grad_scale", device);
  a.loss_scale = number_of(loss_scale, "loss_scale", device);
  a.found_inf = number_of(found_inf, "found_inf", device);
  a.steps = static_cast<float*>(writable(steps));
  a.num_steps = steps.numel();
  a.scalars = scalars.mutable_data_ptr<double>();
  ZOO_LAUNCH(update_scalars, steps, a);
  return scalars;
}

}  // namespace

ZOO_OPERATORS(define) {
  define(
      "update_(int rule, int flags, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states0, Tensor(c!)[] states1, "
      "Tensor(d!)[] states2, Tensor(e!)[] masters, float[] scalars, Tensor? device_scalars=None) -> ()",
      update_lists);
  define(
      "lamb_direction_(int flags, Tensor[] params, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, "
      "Tensor[] masters, float[] scalars, Tensor? device_scalars=None) -> Tensor",
      direction_of_lists);
  define(
      "lamb_apply_(int flags, Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(b!)[] masters, "
      "Tensor ratios, float[] scalars, Tensor? device_scalars=None) -> ()",
      apply_to_lists);
  define(
      "update_scalars_(int rule, int flags, float[] settings, Tensor(a!) steps, Tensor? lr, Tensor? grad_scale, "
      "Tensor? loss_scale, Tensor? found_inf) -> Tensor",
      scalars_of_step);
}

#if !defined(ZOO_CUDA)

namespace {

void update_rows(int rule, int flags, const Scalars& scalars, Formats formats, const Row* rows, int64_t num_rows) {
  ZOO_DISPATCH(update, rule, flags, scalars, formats, rows, num_rows);
}

bool has_rule(int rule, int flags) { return with_rule(rule, flags, Nothing{}); }

}  // namespace

#endif

}  // namespace zoo

#if !defined(ZOO_CUDA)

const zoo::UpdateKernels* zoo_update_kernels() {
  static constexpr zoo::UpdateKernels kernels{&zoo::has_rule, &zoo::update_rows};
  return &kernels;
}

#endif
