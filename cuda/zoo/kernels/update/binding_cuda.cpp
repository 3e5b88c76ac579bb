// The update on CUDA as operators of torch.
#include "../common/cuda_call.h"
#include "binding.h"
#include "update_cuda.h"

namespace zoo {
namespace {

void update_(int64_t rule, int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList states0,
             at::TensorList states1, at::TensorList states2, at::TensorList masters, c10::ArrayRef<double> scalars) {
  update(rule, flags, params, grads, {states0, states1, states2}, masters, scalars, at::kCUDA,
         [=](const Scalars& c, const Table& table, const at::Tensor& first) {
           const CudaCall call("update_", first);
           const int32_t found = zoo_update_cuda(int32_t(rule), int32_t(flags), &c, &table.formats, table.rows.data(),
                                                 int64_t(table.rows.size()), call.stream());
           if (found != -1) call.check(found);
           return found != -1;
         });
}

at::Tensor lamb_direction_(int64_t flags, at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                           at::TensorList exp_avg_sqs, at::TensorList masters, c10::ArrayRef<double> scalars) {
  return lamb_direction(
      flags, params, grads, exp_avgs, exp_avg_sqs, masters, scalars, at::kCUDA,
      [=](const Scalars& c, const Table& table, double* norms, const at::Tensor& first) {
        const CudaCall call("lamb_direction_", first);
        int64_t count = 0;
        for (const Row& row : table.rows) count += (row.n + LAMB_PART - 1) / LAMB_PART;
        at::Tensor parts = call.scratch(2 * count, at::kDouble);
        call.check(zoo_lamb_direction_cuda(int32_t(flags), &c, &table.formats, table.rows.data(),
                                           int64_t(table.rows.size()), parts.mutable_data_ptr<double>(), norms,
                                           call.stream()));
      });
}

void lamb_apply_(int64_t flags, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                 at::TensorList masters, const at::Tensor& ratios, c10::ArrayRef<double> scalars) {
  lamb_apply(flags, params, exp_avgs, exp_avg_sqs, masters, ratios, scalars, at::kCUDA,
             [=](const Scalars& c, const Table& table, const float* ratio, const at::Tensor& first) {
               const CudaCall call("lamb_apply_", first);
               call.check(zoo_lamb_apply_cuda(int32_t(flags), &c, &table.formats, table.rows.data(),
                                              int64_t(table.rows.size()), ratio, call.stream()));
             });
}

}  // namespace

TORCH_LIBRARY_IMPL(zoo, CUDA, m) {
  m.impl("update_", &update_);
  m.impl("lamb_direction_", &lamb_direction_);
  m.impl("lamb_apply_", &lamb_apply_);
}

}  // namespace zoo
