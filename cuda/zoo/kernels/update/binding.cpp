// The update as operators of torch and as the class Rows.
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <vector>

#include "../common/operators.h"
#include "../common/parallel.h"
#include "../common/squares.h"
#include "update.h"

namespace zoo {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr const char* STATE_NAMES[MAX_STATES] = {"states0", "states1", "states2"};

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

void check_length(size_t found, size_t wanted, const char* what) {
  TORCH_CHECK_VALUE(found == wanted, what, " has ", found, " tensors and params has ", wanted,
                    "; they must be as many.");
}

// Lists of tensors as rows, checked.
class Table {
 public:
  enum Access { READ, WRITE, OWN };  // OWN: written, but known to nobody's graph, so that its version may stay

  Table(int64_t rule, int64_t flags, const at::Device& device, Access params = WRITE, Access states = WRITE)
      : num_states_(num_states(int(rule), int(flags))), device_(device), params_(params), states_(states) {}

  int64_t size() const { return int64_t(rows.size()); }

  void check_lists(at::TensorList params, const std::array<at::TensorList, MAX_STATES>& states,
                   at::TensorList masters) {
    for (int k = 0; k < MAX_STATES; ++k)
      check_length(states[size_t(k)].size(), k < num_states_ ? params.size() : 0, STATE_NAMES[k]);
    check_length(masters.size(), masters.empty() ? 0 : params.size(), "masters");
    rows.resize(params.size());
  }

  // Row `index`, which names it in messages too; row 0 first, it decides the formats. grad may be null: the second pass
  // of LAMB needs none.
  void set(int64_t index, const at::Tensor& param, const at::Tensor* grad,
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
    rows[size_t(index)] = row;
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
  Table table(rule, flags, device_of(first));
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
  Table table(LAMB, flags, device_of(first), /*params=*/Table::READ);
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
  Table table(LAMB, flags, device, /*params=*/Table::WRITE, /*states=*/Table::READ);
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

#if !defined(ZOO_CUDA)

// Tensors that an optimizer updates again and again, held here so that a step hands nothing over but scalars: gradients
// are read from the parameters. Addresses are read anew in each step, so a parameter may move to other memory.
//
// CPU only: there a step on small tensors takes as long as walking their objects. On a GPU the walk goes on while the
// launches before it are at work.
class Rows : public torch::CustomClassHolder {
 public:
  Rows(Tensors params, Tensors states0, Tensors states1, Tensors states2, Tensors masters)
      : params_(std::move(params)),
        states_{{std::move(states0), std::move(states1), std::move(states2)}},
        masters_(std::move(masters)) {}

  // False, and nothing done, if some parameter has no gradient.
  bool update(int64_t rule, int64_t flags, std::vector<double> scalars) {
    Table table(rule, flags, at::Device(at::kCPU), Table::WRITE, Table::OWN);
    table.rows = std::move(rows_);  // its memory, not its contents
    table.check_lists(params_, {states_[0], states_[1], states_[2]}, masters_);
    if (!fill(table, 0, params_.empty() ? 0 : 1) || !fill_on_threads(table)) return false;
    check_rule(rule, flags);
    const Scalars given = rounded(numbers_of<NUM_SCALARS>(scalars, "scalars").data());
    ZOO_LAUNCH(update, params_[0], int(rule), int(flags), given, table.formats, table.rows.data(), table.size());
    rows_ = std::move(table.rows);
    return true;
  }

 private:
  static constexpr size_t AHEAD = 6, STAGES = 4;
  static constexpr int64_t ROWS_A_THREAD = 512;  // looking at fewer takes less time than waking a thread

  // Rows [begin, end); false if a parameter has no gradient.
  bool fill(Table& table, size_t begin, size_t end) const {
    // The objects of tensors lie all over memory, each behind the address in another, and the update of the step before
    // has driven them out of the caches. So a row is asked for in stages, several rows ahead of the one looked at.
    for (size_t i = begin; i < begin + STAGES * AHEAD && i < end; ++i) ask_for_objects(i);
    for (size_t i = begin; i < begin + (STAGES - 1) * AHEAD && i < end; ++i) ask_for_storages(i);
    for (size_t i = begin; i < begin + (STAGES - 2) * AHEAD && i < end; ++i) ask_for_grad(i);
    for (size_t i = begin; i < end; ++i) {
      if (i + STAGES * AHEAD < end) ask_for_objects(i + STAGES * AHEAD);
      if (i + (STAGES - 1) * AHEAD < end) ask_for_storages(i + (STAGES - 1) * AHEAD);
      if (i + (STAGES - 2) * AHEAD < end) ask_for_grad(i + (STAGES - 2) * AHEAD);
      if (i + AHEAD < end) ask_for_grad_storage(i + AHEAD);
      const at::Tensor& grad = params_[i].grad();
      if (!grad.defined()) return false;
      std::array<const at::Tensor*, MAX_STATES> s{};
      for (size_t k = 0; k < MAX_STATES; ++k) s[k] = states_[k].empty() ? nullptr : &states_[k][i];
      table.set(int64_t(i), params_[i], &grad, s, masters_.empty() ? nullptr : &masters_[i]);
    }
    return true;
  }

  // All rows but the first, in parts; of several refusals one is raised.
  bool fill_on_threads(Table& table) const {
    const int64_t count = table.size() - 1;
    std::atomic<bool> complete{true};
    std::exception_ptr refusal;
    std::mutex mutex;
    split_evenly(count, 1, count * (GRAIN / ROWS_A_THREAD), [&](int64_t begin, int64_t end) {
      try {
        if (!fill(table, size_t(begin + 1), size_t(end + 1))) complete = false;
      } catch (...) {  // no exception may leave a thread of OpenMP
        const std::lock_guard<std::mutex> hold(mutex);
        refusal = std::current_exception();
      }
    });
    if (refusal) std::rethrow_exception(refusal);
    return complete;
  }

  // Objects begin anywhere in a cache line, so of what is looked at both ends are asked for: the storage and the
  // counter of versions, which stand beside each other, and the last members, from the offset and the number of
  // elements on.
  static void ask_for_object(const at::Tensor& t) {
    const c10::TensorImpl* impl = t.unsafeGetTensorImpl();
    const char* const end = reinterpret_cast<const char*>(impl + 1);
    __builtin_prefetch(&impl->unsafe_storage());
    __builtin_prefetch(&impl->version_counter());
    __builtin_prefetch(end - 32);
    __builtin_prefetch(end - 1);
  }

  // The address of its memory and the flags beside it, in the first 64 bytes but for those that every object begins
  // with.
  static void ask_for_storage(const at::Tensor& t) {
    const char* storage =
        reinterpret_cast<const char*>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    __builtin_prefetch(storage + 16);
    __builtin_prefetch(storage + 63);
  }

  template <class Fn>
  void each(size_t i, const Fn& fn) const {
    fn(params_[i]);
    for (const Tensors& states : states_)
      if (!states.empty()) fn(states[i]);
    if (!masters_.empty()) fn(masters_[i]);
  }

  void ask_for_objects(size_t i) const { each(i, ask_for_object); }

  void ask_for_storages(size_t i) const {
    each(i, ask_for_storage);
    const c10::TensorImpl* impl = params_[i].unsafeGetTensorImpl();
    const char* meta = reinterpret_cast<const char*>(impl->autograd_meta());
    __builtin_prefetch(meta);
    __builtin_prefetch(meta + 64);
    // The counter that writable() raises is behind the only member of this object. (A prefetch of a wrong address,
    // should that ever change, does no harm.)
    __builtin_prefetch(*reinterpret_cast<void* const*>(&impl->version_counter()), 1);
  }

  void ask_for_grad(size_t i) const {
    const at::Tensor& grad = params_[i].grad();
    if (grad.defined()) ask_for_object(grad);
  }

  void ask_for_grad_storage(size_t i) const {
    const at::Tensor& grad = params_[i].grad();
    if (grad.defined()) ask_for_storage(grad);
  }

  Tensors params_;
  std::array<Tensors, MAX_STATES> states_;
  Tensors masters_;
  std::vector<Row> rows_;
};

#endif

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
#if !defined(ZOO_CUDA)
  define.library()
      .class_<Rows>("Rows")
      .def(torch::init<Tensors, Tensors, Tensors, Tensors, Tensors>())
      .def("update", &Rows::update);
#endif
}

}  // namespace zoo
