"""A decoder layer before and after the cache, operation by operation."""

from __future__ import annotations

import torch

from zoo.kernels.activation import activate_
from zoo.kernels.cached_attention import cached_attention
from zoo.kernels.packed_linear import PackedWeight, packed_linear
from zoo.kernels.rms_norm import add_rms_norm, rms_norm
from zoo.kernels.rotary_cache import rotary_cache_
from zoo.kernels.thin_linear import thin_linears

Tensor = torch.Tensor


def before_cache(
    x: Tensor, norm: Tensor, eps: float, plus_one: bool, weights: list[Tensor], biases: list[Tensor], codes: list[int],
    head_norms: list[Tensor], head_eps: list[float], heads_plus_one: bool, cos: Tensor, sin: Tensor,
    keys: Tensor | None, values: Tensor | None, places: Tensor | None, heads: int, groups: int,
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.decoder_layer.before_cache`."""
    qkv = _product(rms_norm(x, norm, eps=eps, plus_one=plus_one), weights, biases, codes)
    parts = qkv.view(*qkv.shape[:2], heads + 2 * groups, -1)
    of_heads = (slice(0, heads), slice(heads, heads + groups))
    for which, weight, own in zip(of_heads, head_norms, head_eps, strict=False):
        part = parts[:, :, which]
        part.copy_(rms_norm(part.contiguous(), weight, eps=own, plus_one=heads_plus_one))
    rotary_cache_(qkv, cos, sin, keys=keys, values=values, places=places, q_heads=heads, kv_heads=groups)
    return qkv


def attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, out: list[Tensor],
    out_bias: list[Tensor], out_codes: list[int],
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.decoder_layer.attention`."""
    return _product(cached_attention(q, keys, values, mask, scale=scale), out, out_bias, out_codes)


def feed_forward(
    made: Tensor, x: Tensor, norm: Tensor, eps: float, plus_one: bool, gate_up: list[Tensor],
    gate_up_biases: list[Tensor], gate_up_codes: list[int], activation: str, down: list[Tensor],
    down_bias: list[Tensor], down_codes: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`zoo.kernels.decoder_layer.feed_forward`."""
    h, y = add_rms_norm(made, x, norm, eps=eps, plus_one=plus_one)
    both = _product(h, gate_up, gate_up_biases, gate_up_codes)
    a = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    activate_(a, both, activation, gated=True)
    return _product(a, down, down_bias, down_codes), y


def after_cache(
    x: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, out: list[Tensor],
    out_bias: list[Tensor], out_codes: list[int], norm: Tensor, eps: float, plus_one: bool, gate_up: list[Tensor],
    gate_up_biases: list[Tensor], gate_up_codes: list[int], activation: str, down: list[Tensor],
    down_bias: list[Tensor], down_codes: list[int],
) -> Tensor:  # fmt: skip
    """See :func:`zoo.kernels.decoder_layer.after_cache`."""
    made = attention(q, keys, values, mask, scale, out, out_bias, out_codes)
    d, y = feed_forward(
        made, x, norm, eps, plus_one, gate_up, gate_up_biases, gate_up_codes, activation, down, down_bias, down_codes
    )
    return y + d


def _product(x: Tensor, weights: list[Tensor], biases: list[Tensor], codes: list[int]) -> Tensor:
    if not codes:
        return thin_linears(x, weights, biases)
    rows, bits, group_size, int8 = codes
    q, scales, *minima = weights
    weight = PackedWeight(q, scales, minima[0] if minima else None, (rows, x.shape[-1]), bits, group_size)
    return packed_linear(x, weight, biases[0] if biases else None, activations="int8" if int8 else "exact")
