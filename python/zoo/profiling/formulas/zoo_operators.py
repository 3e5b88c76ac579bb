"""Formulas of zoo's own operators, by name: nothing of the packages that have them is imported.

A package of one's own calls :func:`zoo.profiling.register_formula`.

Legend: R rows, T tokens, D hidden size, W width of the first product of a perceptron (H, or 2H with a gate), N, K sizes
of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zoo.cost.operators import NOTHING, Work, attention, matrix_product
from zoo.profiling.formulas.call import Call, Counted, Formula, is_real, numel

__all__ = ["OWN", "OWN_MOVES"]


def _bare(work: Work) -> Work:
    return Work(macs=work.macs, masked_macs=work.masked_macs, elementwise=work.elementwise)


def _each(name: str, operations: int) -> Formula:
    """``operations`` for each element of that argument: a tensor, or a list of them."""

    def formula(call: Call) -> Counted:
        given = call[name]
        return Work(elementwise=operations * sum(t.numel() for t in _list(given)))

    return formula


def _list(given: Any) -> Sequence[torch.Tensor]:
    return () if given is None else (given,) if isinstance(given, torch.Tensor) else given


def _updates(operations: dict[int, int]) -> Formula:
    """By the number of the rule (zoo.kernels.update.algebra.Rule): moments, decay and step of an element."""

    def formula(call: Call) -> Counted:
        return Work(elementwise=operations[call["rule"]] * sum(t.numel() for t in call["params"]))

    return formula


# -- linear layers of few tokens --------------------------------------------------------------------------------------


def _thin_linear(call: Call) -> Counted:
    *rows, k = call.shape("x")
    return _product(numel(rows), k, call["weights"], call["biases"], ())


def _product(rows: int, k: int, weights: Sequence[torch.Tensor], biases: Sequence[Any], codes: Sequence[int]) -> Work:
    """Of weights (N, K) that stand one below the other, or of codes, whose first number is N."""
    n = codes[0] if codes else sum(len(weight) for weight in weights)
    return _bare(matrix_product(rows, k, n, bias=bool(len(biases))))


def _packed_linear(call: Call) -> Counted:
    *rows, k = call.shape("x")
    return _bare(matrix_product(numel(rows), k, call["rows"], bias=call["bias"] is not None))


def _packed_linear_backward(call: Call) -> Counted:
    *rows, n = call.shape("grad_y")
    return _bare(matrix_product(numel(rows), n, call["columns"]))


def _cached_attention(call: Call) -> Work:
    """Without a mask the last query sees the last key."""
    batch, heads, queries, size = call.shape("q")
    _, groups, keys, _ = call.shape("keys")
    causal = "end" if call["mask"] is None else False
    return _bare(attention(batch, heads, queries, keys, size, kv_heads=groups, causal=causal))  # type: ignore[arg-type]


_RMS = 4  # with a weight, of an element


def _before_cache(call: Call) -> Counted:
    *rows, k = call.shape("x")
    made = _product(numel(rows), k, call["weights"], call["biases"], call["codes"])
    turned = numel(rows) * call["cos"].shape[-1] * (call["heads"] + call["groups"])
    return made + Work(elementwise=_RMS * numel(call.shape("x")) + 3 * turned)


def _out(call: Call) -> Work:
    batch, heads, queries, size = call.shape("q")
    return _cached_attention(call) + _product(
        batch * queries, heads * size, call["out"], call["out_bias"], call["out_codes"]
    )


def _perceptron(call: Call, x: str) -> Work:
    """A sum, a norm, gate and up, their product, down; gate and up are one product of twice the width."""
    *rows, k = call.shape(x)
    many = numel(rows)
    wide = _product(many, k, call["gate_up"], call["gate_up_biases"], call["gate_up_codes"])
    hidden = wide.macs // (2 * many * k) if many and k else 0
    down = _product(many, hidden, call["down"], call["down_bias"], call["down_codes"])
    return wide + down + Work(elementwise=(_RMS + 1) * many * k + 2 * many * hidden)


def _after_cache(call: Call) -> Counted:
    return _out(call) + _perceptron(call, "x") + Work(elementwise=numel(call.shape("x")))


def _feed_forward(call: Call) -> Counted:
    return _perceptron(call, "made")


def _attention_alone(call: Call) -> Counted:
    return _out(call)


# -- experts ----------------------------------------------------------------------------------------------------------


def _rows(call: Call, of: str) -> int:
    """Rows that belong to an expert; all there are, where values cannot be read."""
    counts = call["counts"]
    return int(counts.sum()) if is_real(counts) else call.shape(of)[0]


def _grouped_linear(call: Call) -> Counted:
    _, k, n = call.shape("w")
    return _bare(matrix_product(_rows(call, "x"), k, n, bias=call["bias"] is not None))


def _grouped_weight_grad(call: Call) -> Counted:
    return _bare(matrix_product(call.shape("x")[1], _rows(call, "x"), call.shape("dy")[1]))


def _perceptrons(call: Call) -> tuple[Work, int]:
    (_, wide, width), (_, hidden, out) = call.shape("up"), call.shape("down")
    rows = _rows(call, "x")
    return _bare(matrix_product(rows, wide, width) + matrix_product(rows, hidden, out)), rows * hidden


def _grouped_mlp(call: Call) -> Counted:
    products, hidden = _perceptrons(call)
    biases = sum(_rows(call, "x") * call.shape(name)[1] for name in ("up_bias", "down_bias") if call[name] is not None)
    return products + Work(elementwise=(2 if call["gated"] else 1) * hidden + biases)


def _grouped_mlp_backward(call: Call) -> Counted:
    """Two gradients a product; the activation is computed again, because only its input was kept."""
    products, hidden = _perceptrons(call)
    of_activation = Work(elementwise=(2 if call["gated"] else 1) * hidden)
    return 2 * products + 2 * of_activation, of_activation


def _gate(times: int) -> Callable[[Call], Counted]:
    def formula(call: Call) -> Counted:
        return Work(elementwise=times * numel(call.shape("logits")))

    return formula


def _nothing(call: Call) -> Counted:
    return NOTHING


OWN: dict[str, Formula] = {
    "zoo::thin_linear": _thin_linear,
    "zoo::packed_linear": _packed_linear,
    "zoo::packed_linear_backward": _packed_linear_backward,
    "zoo::cached_attention": _cached_attention,
    "zoo::decoder_before_cache": _before_cache,
    "zoo::decoder_attention": _attention_alone,
    "zoo::decoder_feed_forward": _feed_forward,
    "zoo::decoder_after_cache": _after_cache,
    "zoo::rotary_cache_": _each("qkv", 3),  # two products and a sum
    "zoo::activate_": _each("a", 2),
    "zoo::activate_backward_": _each("grad_pre", 3),
    "zoo::bias_gelu": _each("x", 2),
    "zoo::bias_gelu_backward": _each("x", 3),
    "zoo::layer_norm": _each("x", 7),
    "zoo::add_layer_norm": _each("x", 8),
    "zoo::layer_norm_backward": _each("grad_y", 14),
    "zoo::rms_norm": _each("x", 4),
    "zoo::add_rms_norm": _each("x", 5),
    "zoo::softmax": _each("x", 6),
    "zoo::softmax_backward": _each("y", 5),
    "zoo::bias_dropout_residual": _each("x", 3),
    "zoo::bias_dropout_residual_backward": _each("grad_out", 2),
    "zoo::dropout": _each("x", 1),
    "zoo::sum_squares": _each("tensors", 2),
    "zoo::scale_sum_squares_": _each("tensors", 3),
    "zoo::quantise": _each("x", 3),  # the largest of its group, a product, a rounding
    "zoo::quantise_asymmetric": _each("x", 5),
    "zoo::dequantise_": _each("out", 1),
    "zoo::dequantise_asymmetric_": _each("out", 2),
    "zoo::onebit_compress_": _each("c", 3),
    "zoo::onebit_compress_mean_": _each("c", 3),
    "zoo::onebit_decompress_": _each("out", 1),
    "zoo::onebit_owed_": _each("error", 1),
    "zoo::top_k_gate": _gate(5),
    "zoo::top_k_gate_backward": _gate(5),
    "zoo::unpermute": _each("y", 2),
    "zoo::unpermute_backward": _each("y", 3),
    "zoo::update_": _updates({0: 13, 1: 4, 2: 8, 3: 6}),
    "zoo::update_scalars_": _nothing,  # eleven numbers
    "zoo::lamb_direction_": _each("params", 14),
    "zoo::lamb_apply_": _each("params", 3),
    "zoo_moe::grouped_linear": _grouped_linear,
    "zoo_moe::grouped_weight_grad": _grouped_weight_grad,
    "zoo_moe::grouped_sum": _each("dy", 1),
    "zoo_moe::grouped_mlp": _grouped_mlp,
    "zoo_moe::grouped_mlp_backward": _grouped_mlp_backward,
    "zoo_moe::sum_over": _each("t", 1),
    "zoo_compile::accumulate": _each("gradient", 1),
}  # fmt: skip
"""By "namespace::operator"."""

OWN_MOVES = frozenset({
    "zoo::permute", "zoo::positions_in_expert", "zoo::uniform", "zoo_compile::back_", "zoo_compile::enter_",
    "zoo_compile::leave_", "zoo_compile::mark", "zoo_moe::count", "zoo_moe::exchange_counts",
    "zoo_moe::exchange_finish", "zoo_moe::exchange_start",
})  # fmt: skip
"""Those that move bytes, draw numbers or count with integers: no floating-point operation."""
