// An update that is prepared once: the tensors of an optimizer are held here, and a step hands over nothing but
// numbers.
//
// A step first looks at every tensor, then updates all of them or none. Nothing is taken for granted: memory may have
// been moved, resized or replaced since the step before, and gradients are others in every step. What is looked at is
// the object of each tensor and of its storage, in a few cache lines each. They lie all over memory, and the update of
// the step before has driven them out of the caches: so where they are is kept from the step before, and they are asked
// for some rows ahead. What looks as expected takes a few instructions; what does not, the whole check, whose refusals
// have a sentence.
//
// CPU only: there a step on small tensors would take as long as walking over their objects from Python. On a GPU the
// walk goes on while the launches before it are at work.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "../common/parallel.h"
#include "table.h"

namespace zoo {

using Tensors = std::vector<at::Tensor>;

// What the objects of the tensors of one kind, such as all parameters, look like.
class Look {
 public:
  // From now on tensors look as expected that look as this one, which has passed the whole check.
  void take(const at::Tensor& like) {
    dtype_ = like.dtype();
    size_ = int64_t(like.element_size());
    keys_ = like.key_set();
    // Tensors that answer for themselves, such as those of subclasses, take the whole check.
    plain_ = !keys_.has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Conjugate,
                                                 c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}));
  }

  // Whether a tensor of n elements looks as expected; its storage and where its elements begin.
  bool fits(const c10::TensorImpl* impl, int64_t n, c10::StorageImpl** storage, int64_t* begin) const {
    if (!plain_ || impl->key_set() != keys_ || impl->dtype() != dtype_ || impl->numel() != n ||
        !impl->is_contiguous(at::MemoryFormat::Contiguous))
      return false;
    *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    *begin = impl->storage_offset() * size_;
    return size_t(*begin + n * size_) <= (*storage)->nbytes();
  }

 private:
  caffe2::TypeMeta dtype_;
  c10::DispatchKeySet keys_;
  int64_t size_ = 0;
  bool plain_ = false;
};

// Objects begin anywhere in a cache line, so of what is looked at both ends are asked for. Of a tensor: its storage,
// and the last members, from the offset and the number of elements on.
inline void ask_for_object(const c10::TensorImpl* impl) {
  const char* const end = reinterpret_cast<const char*>(impl + 1);
  __builtin_prefetch(&impl->unsafe_storage());
  __builtin_prefetch(end - 32);
  __builtin_prefetch(end - 1);
}

// The address of its memory, its size and the flags beside it. A prefetch of an address where no storage is any more
// does no harm.
inline void ask_for_storage(const void* storage) {
  __builtin_prefetch(static_cast<const char*>(storage) + 16);
  __builtin_prefetch(static_cast<const char*>(storage) + 63);
}

class UpdatePlan {
 public:
  // `steps`: how many steps each parameter has taken, fp32, which count() raises.
  UpdatePlan(const UpdateKernels* kernels, const Tensors& params, const std::vector<Tensors>& states,
             const Tensors& masters, at::Tensor steps)
      : kernels_(kernels), steps_(std::move(steps)) {
    const size_t count = params.size();
    TORCH_CHECK_VALUE(count > 0, "params has no tensors; it must have at least one.");
    TORCH_CHECK_VALUE(states.size() <= MAX_STATES, "states has ", states.size(), " lists; a rule keeps at most ",
                      MAX_STATES, " states.");
    for (size_t k = 0; k < states.size(); ++k) check_length(states[k].size(), count, STATE_NAMES[k]);
    if (!masters.empty()) check_length(masters.size(), count, "masters");
    check_flat(steps_, "steps", int64_t(count), at::kFloat, at::Device(at::kCPU));
    num_states_ = states.size();
    width_ = 1 + num_states_ + (masters.empty() ? 0 : 1);
    tensors_.reserve(count * width_);
    for (size_t i = 0; i < count; ++i) {
      tensors_.push_back(params[i]);
      for (const Tensors& list : states) tensors_.push_back(list[i]);
      if (!masters.empty()) tensors_.push_back(masters[i]);
    }
    places_.resize(count * (width_ + 1));
    looks_.resize(width_);
    rows_.resize(count, Row{{}, {}, {}, {}, 0, 1.0f});
  }

  // Step `step` of all parameters, counted from 1. False, and nothing done, if a parameter has no gradient.
  bool update(int rule, int flags, const Settings& settings, int64_t step) {
    const std::lock_guard<std::mutex> alone(mutex_);
    TORCH_CHECK_VALUE(kernels_->has_rule(rule, flags), "rule ", rule, " has no flags ", flags, "; see update.h.");
    TORCH_CHECK_VALUE(size_t(num_states(rule, flags)) == num_states_, "the plan holds ", num_states_,
                      " states of each parameter; the rule keeps ", num_states(rule, flags), ": make another plan.");
    if (!find_all()) return false;
    double scalars[NUM_SCALARS];
    write_scalars(rule, flags, settings, settings.lr, settings.grad_scale, double(step), scalars);
    kernels_->update(rule, flags, rounded(scalars), formats_, rows_.data(), int64_t(rows_.size()));
    return true;
  }

  // One more step was taken by all parameters.
  void count() {
    auto* const steps = static_cast<float*>(writable(steps_));
    for (size_t i = 0; i < rows_.size(); ++i) steps[i] += 1.0f;
  }

 private:
  static constexpr size_t AHEAD = 6, LEAD = 4 * AHEAD;
  static constexpr int64_t ROWS_A_THREAD = 512;  // looking at fewer takes less time than waking a thread

  bool find_all() {
    if (!expected_ || !find_row(0)) {
      if (!check_row(0)) return false;
      expect();
    }
    const int64_t count = int64_t(rows_.size()) - 1;
    std::atomic<bool> complete{true};
    std::exception_ptr refusal;
    std::mutex mutex;
    split_evenly(count, 1, count * (GRAIN / ROWS_A_THREAD), [&](int64_t begin, int64_t end) {
      try {
        if (!find_rows(size_t(begin + 1), size_t(end + 1))) complete = false;
      } catch (...) {  // no exception may leave a thread of OpenMP; of several refusals one is raised
        const std::lock_guard<std::mutex> hold(mutex);
        refusal = std::current_exception();
      }
    });
    if (refusal) std::rethrow_exception(refusal);
    return complete;
  }

  // Rows [begin, end); false if a parameter has no gradient.
  bool find_rows(size_t begin, size_t end) {
    // Steps before `begin` only ask.
    for (size_t at = 0; at < end - begin + LEAD; ++at) {
      const size_t last = begin + at;  // what is done first to a row is done to this one
      if (last < end) ask_for_places(last);
      if (at >= AHEAD && last - AHEAD < end) ask_for_objects(last - AHEAD);
      if (at >= 2 * AHEAD && last - 2 * AHEAD < end) ask_for_grad(last - 2 * AHEAD);
      if (at >= 3 * AHEAD && last - 3 * AHEAD < end) ask_for_grad_storage(last - 3 * AHEAD);
      if (at >= LEAD && !find_row(last - LEAD) && !check_row(last - LEAD)) return false;
    }
    return true;
  }

  using Meta = torch::autograd::AutogradMeta;

  // The parameter of a row, its states and its master.
  const at::Tensor* tensors_of(size_t i) const { return tensors_.data() + i * width_; }

  static const Meta* meta_of(const at::Tensor& param) {
    return static_cast<const Meta*>(param.unsafeGetTensorImpl()->autograd_meta());
  }

  static const at::Tensor& grad_of(const at::Tensor& param) {
    static const at::Tensor none;
    const Meta* meta = meta_of(param);
    return meta == nullptr ? none : meta->grad_;
  }

  // The row by what is expected; false where anything is otherwise.
  bool find_row(size_t i) {
    const at::Tensor* const tensors = tensors_of(i);
    const at::Tensor& param = tensors[0];
    const at::Tensor& grad = grad_of(param);
    const void** const places = places_.data() + i * (width_ + 1);
    places[width_] = meta_of(param);
    const int64_t n = param.unsafeGetTensorImpl()->numel();
    c10::StorageImpl* storage = nullptr;
    int64_t begin = 0;
    if (!grad.defined() || !grads_.fits(grad.unsafeGetTensorImpl(), n, &storage, &begin)) return false;
    Row& row = rows_[i];
    row.grad = static_cast<const char*>(std::as_const(*storage).data()) + begin;
    for (size_t c = 0; c < width_; ++c) {
      if (!looks_[c].fits(tensors[c].unsafeGetTensorImpl(), n, &storage, &begin)) return false;
      places[c] = storage;
      void* const memory = static_cast<char*>(storage->mutable_data()) + begin;
      if (c == 0) row.param = memory;
      else if (c <= num_states_) row.state[c - 1] = memory;
      else row.master = memory;
    }
    row.n = n;
    if (!param.is_inference()) param.unsafeGetTensorImpl()->bump_version();
    return true;
  }

  // The row by the whole check, which raises a ValueError; false if there is no gradient.
  bool check_row(size_t i) {
    const at::Tensor* const tensors = tensors_of(i);
    const at::Tensor& grad = grad_of(tensors[0]);
    if (!grad.defined()) return false;
    std::array<const at::Tensor*, MAX_STATES> states{};
    for (size_t k = 0; k < num_states_; ++k) states[k] = &tensors[1 + k];
    Table table(int(num_states_), at::Device(at::kCPU), Table::WRITE, Table::OWN);
    if (i > 0) table.formats = formats_;
    rows_[i] = table.row(int64_t(i), tensors[0], &grad, states,
                         width_ > 1 + num_states_ ? &tensors[1 + num_states_] : nullptr);
    if (i == 0) formats_ = table.formats;
    return true;
  }

  void expect() {
    grads_.take(grad_of(tensors_[0]));
    for (size_t c = 0; c < width_; ++c) looks_[c].take(tensors_[c]);
    expected_ = true;
  }

  // Where the objects of a row are, and the row itself.
  void ask_for_places(size_t i) const {
    __builtin_prefetch(tensors_of(i));
    __builtin_prefetch(tensors_of(i + 1) - 1);
    __builtin_prefetch(places_.data() + i * (width_ + 1), 1);
    __builtin_prefetch(places_.data() + (i + 1) * (width_ + 1) - 1, 1);
    __builtin_prefetch(&rows_[i], 1);
  }

  void ask_for_objects(size_t i) const {
    const at::Tensor* const tensors = tensors_of(i);
    const void* const* const places = places_.data() + i * (width_ + 1);
    __builtin_prefetch(&tensors[0].unsafeGetTensorImpl()->version_counter());
    if (places[width_] != nullptr) __builtin_prefetch(&static_cast<const Meta*>(places[width_])->grad_);
    for (size_t c = 0; c < width_; ++c) {
      ask_for_object(tensors[c].unsafeGetTensorImpl());
      ask_for_storage(places[c]);
    }
  }

  void ask_for_grad(size_t i) const {
    const at::Tensor& param = tensors_of(i)[0];
    // The counter that is raised is behind the only member of this object.
    __builtin_prefetch(*reinterpret_cast<void* const*>(&param.unsafeGetTensorImpl()->version_counter()), 1);
    const at::Tensor& grad = grad_of(param);
    if (grad.defined()) ask_for_object(grad.unsafeGetTensorImpl());
  }

  void ask_for_grad_storage(size_t i) const {
    const at::Tensor& grad = grad_of(tensors_of(i)[0]);
    if (grad.defined()) ask_for_storage(grad.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  }

  const UpdateKernels* kernels_;
  Tensors tensors_;  // row by row, in one piece of memory: whatever else is cold, this is not
  // Of each row the storages of its tensors and what autograd knows of its parameter, where they were in the step
  // before: only asked for, never looked at.
  std::vector<const void*> places_;
  size_t num_states_ = 0, width_ = 0;  // width: how many tensors a row has
  Look grads_;
  std::vector<Look> looks_;
  at::Tensor steps_;
  std::vector<Row> rows_;
  Formats formats_{F32, F32, F32};
  bool expected_ = false;
  std::mutex mutex_;
};

}  // namespace zoo
