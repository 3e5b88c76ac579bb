// Numbers by place as an operator of torch.
#include "../common/operators.h"
#include "uniform.h"

namespace zoo {
namespace {

at::Tensor run(const at::Tensor& places, int64_t seed, int64_t count) {
  check_dims(places, "places", 1);
  check_argument(places, "places", {places.size(0)}, at::kLong, device_of(places));
  TORCH_CHECK_VALUE(count >= 0, "count is ", count, "; it must not be negative.");
  at::Tensor u = new_tensor(places, {places.size(0), count}, at::kDouble);
  if (u.numel() == 0) return u;
  const Uniform c{places.const_data_ptr<int64_t>(), u.mutable_data_ptr<double>(), places.size(0), count,
                  uint64_t(seed)};
  ZOO_LAUNCH(uniform, places, c);
  return u;
}

}  // namespace

ZOO_OPERATORS(define) { define("uniform(Tensor places, int seed, int count) -> Tensor", run); }

}  // namespace zoo
