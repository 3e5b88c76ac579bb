// Rotary positions and the cache as an operator of torch.
#include <optional>

#include "../common/operators.h"
#include "rotary_cache.h"

namespace zoo {
namespace {

// From a row of a table (1 or B, T, ...) to the next one, in tokens.
int64_t step_of(const at::Tensor& t, const char* name, int64_t batch, int64_t tokens) {
  TORCH_CHECK_VALUE(t.dim() >= 2 && (t.size(0) == 1 || t.size(0) == batch) && t.size(1) == tokens, name, " has shape ",
                    t.sizes(), "; it must begin with 1 or ", batch, " rows of ", tokens, " tokens.");
  return t.size(0) == 1 ? 0 : tokens;
}

void run(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& keys,
         const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& places, int64_t q_heads,
         int64_t kv_heads, bool interleaved) {
  const at::Device device = device_of(qkv);
  RotaryCache c{};
  c.dtype = dtype_of(qkv, "qkv");
  check_dims(qkv, "qkv", 3);
  check_memory(qkv, "qkv", device);
  c.batch = qkv.size(0);
  c.tokens = qkv.size(1);
  const bool few = q_heads >= 1 && kv_heads >= 1 && q_heads <= qkv.size(2) && kv_heads <= qkv.size(2);
  const int64_t heads = few ? q_heads + 2 * kv_heads : 1;
  TORCH_CHECK_VALUE((few || qkv.size(2) == 0) && qkv.size(2) % heads == 0, "qkv has shape ", qkv.sizes(),
                    "; its last dim must be whole heads of ", q_heads, " q, ", kv_heads, " k and ", kv_heads, " v.");
  c.q_heads = q_heads;
  c.kv_heads = kv_heads;
  c.dim = qkv.size(2) / heads;
  c.table_step = step_of(cos, "cos", c.batch, c.tokens);
  c.table_dtype = dtype_of(cos, "cos");
  check_dims(cos, "cos", 3);
  check_memory(cos, "cos", device);
  check_argument(sin, "sin", cos.sizes(), cos.scalar_type(), device);
  c.rotary = cos.size(2);
  TORCH_CHECK_VALUE(c.rotary % 2 == 0 && c.rotary <= c.dim, "cos has shape ", cos.sizes(),
                    "; its last dim must be even, and at most ", c.dim, ", that of a head.");
  c.interleaved = interleaved;
  TORCH_CHECK_VALUE(keys.has_value() == values.has_value() && keys.has_value() == places.has_value(),
                    "keys, values and places belong together; give all three, or none.");
  if (keys) {
    check_dims(*keys, "keys", 4);
    c.room = keys->size(2);
    check_argument(*keys, "keys", {c.batch, kv_heads, c.room, c.dim}, qkv.scalar_type(), device);
    check_argument(*values, "values", keys->sizes(), qkv.scalar_type(), device);
    c.place_step = step_of(*places, "places", c.batch, c.tokens);
    check_argument(*places, "places", {places->size(0), c.tokens}, at::kLong, device);
    c.cached = true;
    c.places = places->const_data_ptr<int64_t>();
    c.keys = writable(*keys);
    c.values = writable(*values);
  }
  if (qkv.numel() == 0) return;
  c.qkv = writable(qkv);
  c.cos = cos.const_data_ptr();
  c.sin = sin.const_data_ptr();
  ZOO_LAUNCH(rotary_cache, qkv, c);
}

}  // namespace

ZOO_OPERATORS(define) {
  define(
      "rotary_cache_(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!)? keys, Tensor(c!)? values, Tensor? places, "
      "int q_heads, int kv_heads, bool interleaved) -> ()",
      run);
}

}  // namespace zoo
