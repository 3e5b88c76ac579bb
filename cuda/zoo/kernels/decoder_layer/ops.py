"""A decoder layer of few tokens as two functions of tensors, before and after the cache, or as one that keeps its
weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zoo.kernels import loading
from zoo.kernels.decoder_layer import reference
from zoo.kernels.operators import Operator
from zoo.kernels.packed_linear import Activations, PackedWeight, is_int8

Tensor = torch.Tensor


class Product(NamedTuple):
    """What one product multiplies by: the weights of :func:`zoo.kernels.thin_linear.thin_linears`, or codes."""

    weights: list[Tensor]
    """(N, K) each; of codes: q, scales and, where there are, minima."""
    biases: list[Tensor]
    """(N,) each, or none; of codes one or none."""
    codes: list[int]
    """Of codes N, bits, group size, and 1 where x is multiplied in 8 bits, else 0; of weights empty."""

    @classmethod
    def of_codes(
        cls, weight: PackedWeight, bias: Tensor | None = None, *, activations: Activations = "exact"
    ) -> Product:  # fmt: skip
        """Of a packed weight. activations: as :func:`zoo.kernels.packed_linear.packed_linear` takes them."""
        parts = [t for t in (weight.q, weight.scales, weight.minima) if t is not None]
        codes = [weight.shape[0], weight.bits, weight.group_size, int(is_int8(activations))]
        return cls(parts, [] if bias is None else [bias], codes)


class RmsNorm(NamedTuple):
    """As :func:`zoo.kernels.rms_norm.rms_norm` takes it."""

    weight: Tensor
    eps: float
    plus_one: bool


def before_cache(
    x: Tensor, norm: RmsNorm, qkv: Product, cos: Tensor, sin: Tensor, *, heads: int, groups: int,
    head_norms: Sequence[RmsNorm] = (), cache: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """q, k and v of new tokens, turned to their positions: rotary(heads(W·norm(x) + b)).

    Values and bits are those of ``rms_norm``, ``thin_linears`` or ``packed_linear``, and ``rotary_cache_``, called one
    by one; one call costs the host a quarter.

    Args:
        x: (B, T, F), contiguous, fp32, bf16 or fp16.
        cos, sin: (1 or B, T, R), contiguous.
        heads, groups: of q; of k and v.
        head_norms: of q and of k, with one ``plus_one``; or none.
        cache: (keys, values, places) that k and v are written into, as ``rotary_cache_`` takes them; or None. With it
            k is turned there alone.

    Returns:
        (B, T, (heads + 2·groups)·D): q, k and v beside each other, as ``rotary_cache_`` has them.

    Raises:
        ValueError: those of the operators; other numbers of norms, heads or tensors of codes; a gradient is wanted.
    """
    _refuse_gradients(x, norm.weight, *qkv.weights, *qkv.biases)
    y: Tensor = _before(
        x, *norm, *qkv, [n.weight for n in head_norms], [n.eps for n in head_norms],
        bool(head_norms) and head_norms[0].plus_one, cos, sin, *(cache or (None, None, None)), heads, groups,
        check=lambda: _check(x, head_norms, heads, groups, qkv),
    )  # fmt: skip
    return y


def after_cache(
    x: Tensor, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, norm: RmsNorm, *, scale: float,
    out: Product, gate_up: Product, activation: str, down: Product,
) -> Tensor:  # fmt: skip
    """The rest of the layer: y = x + W_out·attention, z = y + W_down·(φ(gate) ⊙ up) with (gate, up) = W·norm(y).

    Args:
        x: as :func:`before_cache` got it.
        q, keys, values, mask, scale: as :func:`zoo.kernels.cached_attention.cached_attention` takes them.
        activation: φ, as :func:`zoo.kernels.activation.activate_` takes it.

    Returns:
        z (B, T, F).

    Raises:
        ValueError: those of the operators; a gradient is wanted.
    """
    _refuse_gradients(x, q, keys, values, norm.weight, *out.weights, *gate_up.weights, *down.weights)
    z: Tensor = _after(
        x, q, keys, values, mask, scale, *out, *norm, *gate_up, activation, *down,
        check=lambda: _check_products((out, gate_up, down)),
    )  # fmt: skip
    return z


def attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float, out: Product
) -> Tensor:  # fmt: skip
    """W_out·attention: the first half of :func:`after_cache`, for ranks of which each has some heads and adds its own
    part to the others'.

    Args:
        q, keys, values, mask, scale, out: as there.

    Returns:
        (B, T, F).

    Raises:
        ValueError: as there.
    """
    _refuse_gradients(q, keys, values, *out.weights)
    made: Tensor = _attention(q, keys, values, mask, scale, *out, check=lambda: _check_products((out,)))
    return made


def feed_forward(
    made: Tensor, x: Tensor, norm: RmsNorm, *, gate_up: Product, activation: str, down: Product
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(W_down·(φ(gate) ⊙ up), y) with y = x + made, (gate, up) = W·norm(y): the second half of :func:`after_cache`, of
    ranks that each have some features of gate and up.

    Args:
        made: (B, T, F), the sum of what :func:`attention` gave each rank.
        x, gate_up, activation, down: as of :func:`after_cache`.

    Returns:
        (B, T, F) twice: what is summed over ranks, and what that sum is added to.

    Raises:
        ValueError: as there.
    """
    _refuse_gradients(made, x, norm.weight, *gate_up.weights, *down.weights)
    found: tuple[Tensor, Tensor] = _feed_forward(
        made, x, *norm, *gate_up, activation, *down, check=lambda: _check_products((gate_up, down))
    )
    return found


def prepare(
    norm: RmsNorm, qkv: Product, *, heads: int, groups: int, scale: float, out: Product, second: RmsNorm,
    gate_up: Product, activation: str, down: Product, head_norms: Sequence[RmsNorm] = (),
) -> Callable[..., Tensor] | None:  # fmt: skip
    """A layer that keeps what it multiplies by: :func:`before_cache` and :func:`after_cache` in one call, with their
    bits, which costs the host a third of those two.

    It sees what becomes of the values of its tensors, and not that another tensor takes the place of one. It has no
    gradient and asks for none: call it under ``torch.no_grad()``.

    Returns:
        (x, cos, sin, keys, values, places, length, mask) → z. x, cos, sin: as :func:`before_cache` takes them. keys,
        values (B, groups, room, D) and places (B, T): where k and v of the tokens go, as ``rotary_cache_`` takes them.
        length: how many of a row are seen, the new ones among them. mask: (B, 1, T, length) bool, or None.
        None: there are no kernels, or no module of classes (:func:`zoo.kernels.loading.classes`).

    Raises:
        ValueError: as those two, at the call.
    """
    classes = loading.classes()
    if classes is None:
        return None
    layer: Callable[..., Tensor] = classes.TokenLayer(
        norm, qkv, head_norms, heads, groups, scale, out, second, gate_up, activation, down
    )
    return layer


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError("the operators of a decoder layer have no gradient; call them under torch.no_grad().")


def _wide(x: Tensor, weights: list[Tensor], codes: list[int]) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes[0] if codes else sum(len(weight) for weight in weights)))


def _fake_before(x: Tensor, norm: Any, eps: Any, plus_one: Any, weights: Any, biases: Any, codes: Any, *_: Any) -> Any:
    return _wide(x, weights, codes)


_before = Operator("decoder_before_cache", reference.before_cache, fake=_fake_before)


def _fake_attention(q: Tensor, keys: Any, values: Any, mask: Any, scale: Any, out: Any, bias: Any, codes: Any) -> Any:
    return _wide(q[:, 0], out, codes)


def _fake_forward(made: Tensor, *_: Any) -> Any:
    return torch.empty_like(made), torch.empty_like(made)


_after = Operator("decoder_after_cache", reference.after_cache, fake=lambda x, *_: torch.empty_like(x))
_attention = Operator("decoder_attention", reference.attention, fake=_fake_attention)
_feed_forward = Operator("decoder_feed_forward", reference.feed_forward, fake=_fake_forward)


def _check(x: Tensor, head_norms: Sequence[RmsNorm], heads: int, groups: int, qkv: Product) -> None:
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must have 3 dims.")
    if heads < 1 or groups < 1:
        raise ValueError(f"there are {heads} heads and {groups} of k and v; at least 1.")
    if len(head_norms) not in (0, 2):
        raise ValueError(f"there are {len(head_norms)} norms of heads; give two, of q and of k, or none.")
    _check_products((qkv,))


def _check_products(products: Sequence[Product]) -> None:
    for product in products:
        if product.codes and not (
            len(product.codes) == 4 and len(product.weights) in (2, 3) and len(product.biases) <= 1
        ):
            raise ValueError(
                f"there are {len(product.codes)} numbers of codes, {len(product.weights)} tensors and "
                f"{len(product.biases)} biases; packed weights have (rows, bits, group size, int8 activations), "
                "(q, scales[, minima]) and at most one bias."
            )
