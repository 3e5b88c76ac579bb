// A decoder layer as two operators of torch, before and after the cache; or, where ranks add up what each has after a
// product, as three: the second of these two is `attention` and `feed_forward`, one sum behind each.
//
//   before:  qkv = rotary(heads(W_qkv·norm(x) + b)), heads: the norms of q and of k where there are; k and v go into a
//            cache too, as rotary_cache writes them
//   after:   y = x + W_out·attention(q, K, V) + b, z = y + W_down·(φ(gate) ⊙ up), (gate, up) = W_gate_up·norm(y)
//
// There is no kernel here: each calls operators of this library, so that a layer costs Python two calls and not eleven,
// and gives the bits of those operators called one by one. A product is that of thin_linear, or, with `codes` (rows,
// bits, group size, 1 with x in 8 bits, else 0), that of packed_linear on (q, scales[, minima]).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>
#include <vector>

#include "../common/operators.h"

namespace zoo {
namespace {

typedef std::optional<at::Tensor> Optional;

template <class Function>
c10::TypedOperatorHandle<Function> operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Function>();
}

struct Product {
  at::TensorList weights, biases;
  at::IntArrayRef codes;
};

at::Tensor multiply(const at::Tensor& x, const Product& p) {
  if (p.codes.empty()) {
    static const auto thin =
        operator_of<at::Tensor(const at::Tensor&, at::TensorList, at::TensorList)>("zoo::thin_linear");
    return thin.call(x, p.weights, p.biases);
  }
  TORCH_CHECK_VALUE(p.codes.size() == 4 && (p.weights.size() == 2 || p.weights.size() == 3) && p.biases.size() <= 1,
                    "there are ", p.codes.size(), " numbers of codes, ", p.weights.size(), " tensors and ",
                    p.biases.size(),
                    " biases; packed weights have (rows, bits, group size, int8 activations), "
                    "(q, scales[, minima]) and at most one bias.");
  static const auto packed =
      operator_of<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, const Optional&,
                             int64_t, int64_t, int64_t, bool)>("zoo::packed_linear");
  const Optional minima = p.weights.size() == 3 ? Optional(p.weights[2]) : std::nullopt;
  const Optional bias = p.biases.empty() ? std::nullopt : Optional(p.biases[0]);
  return packed.call(x, p.weights[0], p.weights[1], minima, bias, p.codes[0], p.codes[1], p.codes[2], p.codes[3] != 0);
}

at::Tensor norm_of(const at::Tensor& x, const at::Tensor& weight, double eps, bool plus_one) {
  static const auto norm = operator_of<at::Tensor(const at::Tensor&, const at::Tensor&, double, bool)>("zoo::rms_norm");
  return norm.call(x, weight, eps, plus_one);
}

at::Tensor before_cache(const at::Tensor& x, const at::Tensor& norm, double eps, bool plus_one, at::TensorList weights,
                        at::TensorList biases, at::IntArrayRef codes, at::TensorList head_norms,
                        at::ArrayRef<double> head_eps, bool heads_plus_one, const at::Tensor& cos,
                        const at::Tensor& sin, const Optional& keys, const Optional& values, const Optional& places,
                        int64_t heads, int64_t groups) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  check_dims(x, "x", 3);
  TORCH_CHECK_VALUE(heads >= 1 && groups >= 1, "there are ", heads, " heads and ", groups, " of k and v; at least 1.");
  TORCH_CHECK_VALUE((head_norms.empty() || head_norms.size() == 2) && head_norms.size() == head_eps.size(),
                    "there are ", head_norms.size(), " norms of heads and ", head_eps.size(),
                    " eps; give two of each, of q and of k, or none.");
  at::Tensor qkv = multiply(norm_of(x, norm, eps, plus_one), {weights, biases, codes});
  const bool few = heads <= qkv.size(2) && groups <= qkv.size(2);  // so that their sum is a number
  const int64_t all = few ? heads + 2 * groups : 1;
  TORCH_CHECK_VALUE(few && qkv.size(2) % all == 0, "q, k and v have ", qkv.size(2),
                    " features; they must be whole heads of ", heads, " q, ", groups, " k and ", groups, " v.");
  if (!head_norms.empty()) {
    const at::Tensor parts = qkv.view({qkv.size(0), qkv.size(1), all, qkv.size(2) / all});
    for (int i = 0; i < 2; ++i) {
      const at::Tensor part = parts.narrow(2, i * heads, i == 0 ? heads : groups);
      part.copy_(norm_of(part.contiguous(), head_norms[i], head_eps[i], heads_plus_one));
    }
  }
  static const auto rotary =
      operator_of<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, const Optional&,
                       const Optional&, int64_t, int64_t, bool)>("zoo::rotary_cache_");
  rotary.call(qkv, cos, sin, keys, values, places, heads, groups, false);
  return qkv;
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values, const Optional& mask,
                     double scale, at::TensorList out, at::TensorList out_bias, at::IntArrayRef out_codes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto attend =
      operator_of<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&, double)>(
          "zoo::cached_attention");
  return multiply(attend.call(q, keys, values, mask, scale), {out, out_bias, out_codes});
}

std::tuple<at::Tensor, at::Tensor> feed_forward(const at::Tensor& made, const at::Tensor& x, const at::Tensor& norm,
                                                double eps, bool plus_one, at::TensorList gate_up,
                                                at::TensorList gate_up_biases, at::IntArrayRef gate_up_codes,
                                                c10::string_view activation, at::TensorList down,
                                                at::TensorList down_bias, at::IntArrayRef down_codes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto add_norm = operator_of<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, double, bool)>("zoo::add_rms_norm");
  static const auto activate =
      operator_of<void(const at::Tensor&, const at::Tensor&, c10::string_view, bool)>("zoo::activate_");
  const auto [h, y] = add_norm.call(made, x, norm, eps, plus_one);
  const at::Tensor both = multiply(h, {gate_up, gate_up_biases, gate_up_codes});
  check_dims(both, "gate and up", 3);
  at::Tensor a = new_tensor(both, {both.size(0), both.size(1), both.size(2) / 2}, both.scalar_type());
  activate.call(a, both, activation, true);
  return {multiply(a, {down, down_bias, down_codes}), y};
}

at::Tensor after_cache(const at::Tensor& x, const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                       const Optional& mask, double scale, at::TensorList out, at::TensorList out_bias,
                       at::IntArrayRef out_codes, const at::Tensor& norm, double eps, bool plus_one,
                       at::TensorList gate_up, at::TensorList gate_up_biases, at::IntArrayRef gate_up_codes,
                       c10::string_view activation, at::TensorList down, at::TensorList down_bias,
                       at::IntArrayRef down_codes) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor made = attention(q, keys, values, mask, scale, out, out_bias, out_codes);
  const auto [d, y] = feed_forward(made, x, norm, eps, plus_one, gate_up, gate_up_biases, gate_up_codes, activation,
                                   down, down_bias, down_codes);
  return d.add_(y);
}

}  // namespace

ZOO_OPERATORS(define) {
  define.of_operators(
      "decoder_before_cache(Tensor x, Tensor norm, float eps, bool plus_one, Tensor[] weights, Tensor[] biases, "
      "int[] codes, Tensor[] head_norms, float[] head_eps, bool heads_plus_one, Tensor cos, Tensor sin, "
      "Tensor(a!)? keys, Tensor(b!)? values, Tensor? places, int heads, int groups) -> Tensor",
      before_cache);
  define.of_operators(
      "decoder_after_cache(Tensor x, Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor[] out, "
      "Tensor[] out_bias, int[] out_codes, Tensor norm, float eps, bool plus_one, Tensor[] gate_up, "
      "Tensor[] gate_up_biases, int[] gate_up_codes, str activation, Tensor[] down, Tensor[] down_bias, "
      "int[] down_codes) -> Tensor",
      after_cache);
  define.of_operators(
      "decoder_attention(Tensor q, Tensor keys, Tensor values, Tensor? mask, float scale, Tensor[] out, "
      "Tensor[] out_bias, int[] out_codes) -> Tensor",
      attention);
  define.of_operators(
      "decoder_feed_forward(Tensor made, Tensor x, Tensor norm, float eps, bool plus_one, Tensor[] gate_up, "
      "Tensor[] gate_up_biases, int[] gate_up_codes, str activation, Tensor[] down, Tensor[] down_bias, "
      "int[] down_codes) -> (Tensor, Tensor)",
      feed_forward);
}

}  // namespace zoo
