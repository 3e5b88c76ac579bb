// Attention over a cache as an operator of torch.
#include <optional>

#include "../common/operators.h"
#include "cached_attention.h"

namespace zoo {
namespace {

Steps steps_of(const at::Tensor& t, const char* name, int64_t batch, int64_t heads, int64_t length, int64_t dim,
               at::ScalarType dtype, const at::Device& device) {
  check_device(t, name, device);
  check_dtype(t, name, dtype);
  TORCH_CHECK_VALUE(t.sizes() == at::IntArrayRef({batch, heads, length, dim}), name, " has shape ", t.sizes(),
                    "; it must be [", batch, ", ", heads, ", ", length, ", ", dim, "].");
  TORCH_CHECK_VALUE(dim <= 1 || t.numel() == 0 || t.stride(3) == 1, name, " of shape ", t.sizes(), " has strides ",
                    t.strides(), "; its last dim must be contiguous.");
  return {t.stride(0), t.stride(1), t.stride(2)};
}

at::Tensor forward(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                   const std::optional<at::Tensor>& mask, double scale) {
  const at::Device device = device_of(q);
  CachedAttention c{};
  c.dtype = dtype_of(q, "q");
  check_dims(q, "q", 4);
  check_dims(keys, "keys", 4);
  c.batch = q.size(0);
  c.heads = q.size(1);
  c.tokens = q.size(2);
  c.dim = q.size(3);
  c.groups = keys.size(1);
  c.length = keys.size(2);
  TORCH_CHECK_VALUE(c.groups >= 1 && c.heads % c.groups == 0, "q has ", c.heads, " heads and keys have ", c.groups,
                    "; the latter must divide the former.");
  TORCH_CHECK_VALUE(c.length < INT32_MAX, "keys have ", c.length, " tokens; fewer than 2^31 - 1 are allowed.");
  const at::ScalarType dtype = q.scalar_type();
  c.of_q = steps_of(q, "q", c.batch, c.heads, c.tokens, c.dim, dtype, device);
  c.of_keys = steps_of(keys, "keys", c.batch, c.groups, c.length, c.dim, dtype, device);
  c.of_values = steps_of(values, "values", c.batch, c.groups, c.length, c.dim, dtype, device);
  if (mask) {
    check_device(*mask, "mask", device);
    check_dtype(*mask, "mask", at::kBool);
    TORCH_CHECK_VALUE(mask->sizes() == at::IntArrayRef({c.batch, c.tokens, c.length}), "mask has shape ", mask->sizes(),
                      "; it must be [", c.batch, ", ", c.tokens, ", ", c.length, "].");
    c.mask = mask->const_data_ptr<bool>();
    c.mask_row = mask->stride(0);
    c.mask_token = mask->stride(1);
    c.mask_key = mask->stride(2);
  }
  c.scale = float(scale);
  at::Tensor y = new_tensor(q, {c.batch, c.tokens, c.heads * c.dim}, dtype);
  if (y.numel() == 0) return y;
  c.q = q.const_data_ptr();
  c.keys = keys.const_data_ptr();
  c.values = values.const_data_ptr();
  c.y = y.mutable_data_ptr();
#if defined(ZOO_CUDA)
  const int64_t numbers = c.batch * c.heads * c.tokens * c.length;
  const KernelScratch<float> scores(q, numbers);
  const KernelScratch<int32_t> indices(q, mask ? numbers : 0);
  ZOO_LAUNCH(cached_attention, q, c, scores.data(), mask ? indices.data() : nullptr);
#else
  ZOO_LAUNCH(cached_attention, q, c);
#endif
  return y;
}

}  // namespace

ZOO_OPERATORS(define) {
  define("cached_attention(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor", forward);
}

}  // namespace zoo
