// The update as operators of torch and as the class Rows.
//
// It uses torch/library.h and not libtorch's stable ABI: that one hands a list of tensors over at about 0.45 µs a
// tensor, against 0.13 µs here, which alone would be half of an AdamW step on tensors of 4,160 elements; and it does not
// exist before torch 2.9. torch/extension.h, the slow header, is not needed.
#include <torch/custom_class.h>

#include "binding.h"
#include "update_cpu.h"

namespace zoo {
namespace {

using Tensors = std::vector<at::Tensor>;

bool run(int64_t rule, int64_t flags, const Scalars& scalars, const Table& table) {
  return update_cpu(int(rule), int(flags), scalars, table.formats, table.rows.data(), int64_t(table.rows.size()));
}

void update_(int64_t rule, int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList states0,
             at::TensorList states1, at::TensorList states2, at::TensorList masters, c10::ArrayRef<double> scalars) {
  update(rule, flags, params, grads, {states0, states1, states2}, masters, scalars, at::kCPU,
         [=](const Scalars& c, const Table& table, const at::Tensor&) { return run(rule, flags, c, table); });
}

at::Tensor lamb_direction_(int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                           at::TensorList exp_avg_sqs, at::TensorList masters, c10::ArrayRef<double> scalars) {
  return lamb_direction(flags, params, grads, exp_avgs, exp_avg_sqs, masters, scalars, at::kCPU,
                        [=](const Scalars& c, const Table& table, double* norms, const at::Tensor&) {
                          lamb_direction_cpu(int(flags), c, table.formats, table.rows.data(),
                                             int64_t(table.rows.size()), norms);
                        });
}

void lamb_apply_(int64_t flags, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList masters, const at::Tensor& ratios, c10::ArrayRef<double> scalars) {
  lamb_apply(flags, params, exp_avgs, exp_avg_sqs, masters, ratios, scalars, at::kCPU,
             [=](const Scalars& c, Table& table, const float* ratio, const at::Tensor&) {
               for (size_t i = 0; i < table.rows.size(); ++i) table.rows[i].ratio = ratio[i];
               lamb_apply_cpu(int(flags), c, table.formats, table.rows.data(), int64_t(table.rows.size()));
             });
}

// Tensors that an optimizer updates again and again, held here so that a step hands nothing over but scalars: gradients
// are read from the parameters. Addresses are read anew in each step, so a parameter may move to other memory.
//
// CPU only: there a step on small tensors takes as long as walking their objects. On a GPU the walk goes on while the
// launches before it are at work.
class Rows : public torch::CustomClassHolder {
 public:
  Rows(Tensors params, Tensors states0, Tensors states1, Tensors states2, Tensors masters)
      : params_(std::move(params)), states_{{std::move(states0), std::move(states1), std::move(states2)}}, masters_(std::move(masters)) {}

  // False, and nothing done, if some parameter has no gradient.
  bool update(int64_t rule, int64_t flags, std::vector<double> scalars) {
    Table table(rule, flags, at::Device(at::kCPU), Table::WRITE, Table::OWN);
    table.rows = std::move(rows_);  // its memory, not its contents
    table.rows.clear();
    table.check_lists(params_, {states_[0], states_[1], states_[2]}, masters_);
    // The objects of tensors lie all over memory, each behind the address in another, and the update of the step before
    // has driven them out of the caches. So a row is asked for in stages, several rows ahead of the one looked at.
    const size_t count = params_.size();
    for (size_t i = 0; i < STAGES * AHEAD && i < count; ++i) ask_for_objects(i);
    for (size_t i = 0; i < (STAGES - 1) * AHEAD && i < count; ++i) ask_for_storages(i);
    for (size_t i = 0; i < (STAGES - 2) * AHEAD && i < count; ++i) ask_for_grad(i);
    for (size_t i = 0; i < count; ++i) {
      if (i + STAGES * AHEAD < count) ask_for_objects(i + STAGES * AHEAD);
      if (i + (STAGES - 1) * AHEAD < count) ask_for_storages(i + (STAGES - 1) * AHEAD);
      if (i + (STAGES - 2) * AHEAD < count) ask_for_grad(i + (STAGES - 2) * AHEAD);
      if (i + AHEAD < count) ask_for_grad_storage(i + AHEAD);
      const at::Tensor& grad = params_[i].grad();
      if (!grad.defined()) return false;
      std::array<const at::Tensor*, MAX_STATES> s{};
      for (size_t k = 0; k < MAX_STATES; ++k) s[k] = states_[k].empty() ? nullptr : &states_[k][i];
      table.add(int64_t(i), params_[i], &grad, s, masters_.empty() ? nullptr : &masters_[i]);
    }
    TORCH_CHECK_VALUE(run(rule, flags, scalars_of(scalars), table), "rule ", rule, " has no flags ", flags,
                      "; see update.h.");
    rows_ = std::move(table.rows);
    return true;
  }

 private:
  static constexpr size_t AHEAD = 6, STAGES = 4;

  static void ask_for_object(const at::Tensor& t) {
    const char* object = reinterpret_cast<const char*>(t.unsafeGetTensorImpl());
    for (size_t at = 0; at < sizeof(c10::TensorImpl); at += 64) __builtin_prefetch(object + at);
  }

  static void ask_for_storage(const at::Tensor& t) {
    const char* storage = reinterpret_cast<const char*>(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    __builtin_prefetch(storage);
    __builtin_prefetch(storage + 64);
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
    // The counter that writable() raises is behind the only member of this object. (A prefetch of a wrong address, should
    // that ever change, does no harm.)
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

}  // namespace

TORCH_LIBRARY_FRAGMENT(zoo, m) {
  m.def(
      "update_(int rule, int flags, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] states0, Tensor(c!)[] states1, "
      "Tensor(d!)[] states2, Tensor(e!)[] masters, float[] scalars) -> ()");
  m.def(
      "lamb_direction_(int flags, Tensor[] params, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, "
      "Tensor[] masters, float[] scalars) -> Tensor");
  m.def(
      "lamb_apply_(int flags, Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor(b!)[] masters, "
      "Tensor ratios, float[] scalars) -> ()");
  m.class_<Rows>("Rows")
      .def(torch::init<Tensors, Tensors, Tensors, Tensors, Tensors>())
      .def("update", &Rows::update);
}

TORCH_LIBRARY_IMPL(zoo, CPU, m) {
  m.impl("update_", &update_);
  m.impl("lamb_direction_", &lamb_direction_);
  m.impl("lamb_apply_", &lamb_apply_);
}

}  // namespace zoo
