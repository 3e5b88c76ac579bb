"""The checks of the operations of layers, those with gradients; see :mod:`benchmarks.gpu.checks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.gpu.cases import DTYPES, Case, values

from zoo.kernels import activation, bias_gelu, gating, layer_norm, softmax
from zoo.kernels import bias_dropout_residual as dropout
from zoo.kernels.activation import reference as activation_reference
from zoo.kernels.bias_dropout_residual import reference as dropout_reference
from zoo.kernels.bias_gelu import reference as bias_gelu_reference
from zoo.kernels.gating import reference as gating_reference
from zoo.kernels.layer_norm import reference as layer_norm_reference
from zoo.kernels.softmax import reference as softmax_reference

Tensor = torch.Tensor
FP32 = torch.float32


def shapes(large: bool) -> list[tuple[int, ...]]:
    """Rows and dim: none, one, odd, more rows than one part, in packs of eight, in several pieces; then more than 2^20
    elements."""
    return [
        (0, 5),
        (1, 1),
        (3, 7),
        (65, 33),
        (2, 3, 257),
        (67, 264),
        (2, 11328),
        *([(1031, 1021), (5, 4099)] if large else []),
    ]


def layer_norm_cases(large: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in shapes(large):
            for special, weight in ((False, dtype), (False, FP32), (True, dtype)):
                x, r, dy, ds = (values(shape, k, special=special).to(dtype) for k in range(4))
                w, b = (values(shape[-1:], k).to(weight) for k in (4, 5))

                def operation(x: Any, r: Any, dy: Any, ds: Any, w: Any, b: Any) -> Any:
                    plain, added = layer_norm.layer_norm(x, w, b), layer_norm.layer_norm(x, w, b, residual=r)
                    with_sum = layer_norm.layer_norm_backward(dy, ds, added.sum, w, added.mean, added.rstd)
                    without = layer_norm.layer_norm_backward(dy, None, x, w, plain.mean, plain.rstd)
                    return plain.y, plain.mean, plain.rstd, list(added), with_sum, without

                def reference(x: Any, r: Any, dy: Any, ds: Any, w: Any, b: Any) -> Any:
                    y, mean, rstd = layer_norm_reference.layer_norm(x, w, b, 1e-5)
                    added = layer_norm_reference.add_layer_norm(x, r, w, b, 1e-5)
                    with_sum = layer_norm_reference.layer_norm_backward(dy, ds, added[1], w, *added[2:])
                    without = layer_norm_reference.layer_norm_backward(dy, None, x, w, mean, rstd)
                    return y, mean, rstd, list(added), with_sum, without

                what = f"{dtype}, weight {weight}, shape {shape}, special={special}"
                yield Case(what=what, args=(x, r, dy, ds, w, b), operation=operation, reference=reference)


def bias_gelu_cases(large: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in (*shapes(large), (3, 0)):
            for form in ("none", "tanh"):
                for special in (False, True):

                    def operation(x: Any, dy: Any, b: Any, form: str) -> Any:
                        grads = bias_gelu.bias_gelu_backward(dy, x, b, approximate=form)
                        return bias_gelu.bias_gelu(x, b, approximate=form), grads

                    def reference(x: Any, dy: Any, b: Any, form: str) -> Any:
                        grads = bias_gelu_reference.bias_gelu_backward(dy, x, b, form == "tanh")
                        return bias_gelu_reference.bias_gelu(x, b, form == "tanh"), grads

                    x, dy = (values(shape, k, special=special).to(dtype) for k in range(2))
                    args = (x, dy, values(shape[-1:], 2).to(dtype), form)
                    what = f"{dtype}, {form}, shape {shape}, special={special}"
                    yield Case(what=what, args=args, operation=operation, reference=reference)


def activation_cases(large: bool) -> Iterator[Case]:
    for dtype in DTYPES:
        for shape in (*shapes(large), (3, 0)):
            for form in activation.FORMS:
                for gated in (False, True):

                    def operation(a: Any, dp: Any, da: Any, pre: Any, form: str, gated: bool) -> Any:
                        first = torch.empty_like(a)
                        activation.activate_(first, pre, form, gated=gated)
                        activation.activate_backward_(a, dp, da, pre, form, gated=gated)
                        return first, a, dp

                    def reference(a: Any, dp: Any, da: Any, pre: Any, form: str, gated: bool) -> Any:
                        grads = activation_reference.activate_backward(da, pre, form, gated)
                        return activation_reference.activate(pre, form, gated), *grads

                    special = gated
                    wide = (*shape[:-1], shape[-1] * (1 + gated))
                    da, pre = (values(s, k, special=special).to(dtype) for k, s in enumerate((shape, wide)))
                    args = (torch.zeros_like(da), torch.zeros_like(pre), da, pre, form, gated)
                    what = f"{dtype}, {form}, gated={gated}, shape {shape}, special={special}"
                    yield Case(what=what, args=args, operation=operation, reference=reference)


def masks(shape: tuple[int, ...]) -> list[Tensor | None]:
    """None, of all scores, of keys alone, and a column, with hidden keys; in other formats than the scores too."""
    hidden = values(shape, 7)
    hidden = torch.where(hidden > 0.5, -torch.inf, hidden)
    return [None, hidden, hidden[..., :1, :].bfloat16(), values((shape[-2], 1), 8).half()]


def softmax_cases(large: bool) -> Iterator[Case]:
    def operation(x: Any, dy: Any, mask: Any, scale: float, causal: bool) -> Any:
        y = softmax.softmax(x, scale=scale, mask=mask, causal=causal)
        return y, softmax.softmax_backward(dy, y, scale=scale)

    def reference(x: Any, dy: Any, mask: Any, scale: float, causal: bool) -> Any:
        y = softmax_reference.softmax(x, mask, scale, causal)
        return y, softmax_reference.softmax_backward(dy, y, scale)

    for dtype in DTYPES:
        for shape in (*shapes(large), (3, 0), (2, 2, 9, 4)):
            for causal in (False, True):
                for kind, mask in enumerate(masks(shape) if shape[0] else [None]):
                    for special in (False, True):
                        x, dy = (values(shape, k, special=special).to(dtype) for k in range(2))
                        what = f"{dtype}, shape {shape}, mask {kind}, causal={causal}, special={special}"
                        args = (x, dy, mask, 0.3, causal)
                        yield Case(what=what, args=args, operation=operation, reference=reference)


FIRST = (0, 4, 2**40 + 3)
"""Places of the first element that dropout alone is given."""


def dropout_cases(large: bool) -> Iterator[Case]:
    def operation(x: Any, b: Any, r: Any, dy: Any, p: float, seed: int, offset: int) -> Any:
        more: dict[str, Any] = {"p": p, "seed": seed, "offset": offset}
        made = dropout.bias_dropout_residual(x, b, r, **more)
        alone = [dropout.dropout(x, **more, first=first) for first in FIRST]
        return made, dropout.bias_dropout_residual_backward(dy, b, **more), alone

    def reference(x: Any, b: Any, r: Any, dy: Any, p: float, seed: int, offset: int) -> Any:
        made = dropout_reference.bias_dropout_residual(x, b, r, p, seed, offset)
        alone = [dropout_reference.dropout(x, p, seed, offset, first) for first in FIRST]
        return made, dropout_reference.bias_dropout_residual_backward(dy, b, p, seed, offset), alone

    for dtype in DTYPES:
        for shape in (*shapes(large), (3, 0)):
            for p, seed, offset in ((0.0, 1, 0), (0.1, 2**40 + 3, 7), (0.5, -1, 2**62), (1.0, 1, 1)):
                for special in (False, True):
                    x, r, dy = (values(shape, k, special=special).to(dtype) for k in range(3))
                    bias = values(shape[-1:], 3).to(FP32 if special else dtype)
                    what = f"{dtype}, shape {shape}, p {p}, special={special}"
                    args = (x, bias, r, dy, p, seed, offset)
                    yield Case(what=what, args=args, operation=operation, reference=reference)


# Mixture of experts ------------------------------------------------------------------------------------------------


def gate_cases(large: bool) -> Iterator[Case]:
    def operation(logits: Any, dw: Any, k: int, renormalise: bool) -> Any:
        found = gating.top_k_gate(logits, k, renormalise=renormalise)
        return list(found), gating.top_k_gate_backward(dw, logits, found.indices, renormalise=renormalise)

    def reference(logits: Any, dw: Any, k: int, renormalise: bool) -> Any:
        found = gating_reference.top_k_gate(logits, k, renormalise)
        return list(found), gating_reference.top_k_gate_backward(dw, logits, found[1], renormalise)

    for dtype in DTYPES:
        for tokens, experts in ((0, 4), (1, 1), (3, 7), (65, 33), (257, 64), *([(16411, 64), (5, 4099)] * large)):
            for k in sorted({1, min(2, experts), min(5, experts), min(40, experts) if tokens < 100 else 1}):
                for special in (False, True):
                    for renormalise in (False, True):
                        logits = values((tokens, experts), k, special=special)
                        ties = (logits * 4).round() / 4  # equal ones: the lower expert first
                        args = (ties.to(dtype), values((tokens, k), 9), k, renormalise)
                        what = f"{dtype}, {tokens} x {experts}, k {k}, {renormalise=}, special={special}"
                        yield Case(what=what, args=args, operation=operation, reference=reference)


def choices(tokens: int, k: int, experts: int) -> Tensor:
    """k experts a token, the first ones more often."""
    generator = torch.Generator().manual_seed(tokens + k)
    scores = torch.rand(tokens, experts, generator=generator) + torch.linspace(0.5, 0.0, experts)
    return scores.topk(k).indices


def places_cases(large: bool) -> Iterator[Case]:
    def operation(indices: Any, experts: int, capacity: int | None, first: bool, key: Any) -> Any:
        priority: gating.ops.Priority = ("choice" if first else "token") if key is None else key
        found = gating.positions_in_expert(indices, experts, capacity=capacity, priority=priority)
        return found.positions, found.counts, found.demand

    for tokens, k, experts in (
        (0, 2, 3), (1, 1, 1), (5, 3, 4), (129, 2, 8), (3000, 2, 64), *([(400_003, 3, 257)] * large),
    ):  # fmt: skip
        for capacity in (None, 0, 3, tokens * k // experts + 1):
            many, few = values((tokens, k), 3, special=True), (values((tokens, k), 4) * 2).round()  # few: equal ones
            orders = [(True, None), (False, None), (False, few), *((False, many.to(dtype)) for dtype in DTYPES)]
            for first, key in orders:
                args = (choices(tokens, k, experts), experts, capacity, first, key)
                by = "choice" if first else "token" if key is None else f"key of {key.dtype}"
                what = f"{tokens} x {k}, {experts} experts, capacity {capacity}, by {by}"
                yield Case(what=what, args=args, operation=operation, reference=gating_reference.positions_in_expert)


def permute_cases(large: bool) -> Iterator[Case]:
    def operation(x: Any, y: Any, dy: Any, weights: Any, rows: Any) -> Any:
        there = gating.permute(x, rows, num_rows=len(y))
        back = gating.unpermute(y, rows), gating.unpermute(y, rows, weights)
        return there, back, gating.unpermute_backward(dy, y, rows, weights)

    def reference(x: Any, y: Any, dy: Any, weights: Any, rows: Any) -> Any:
        there = gating_reference.permute(x, rows, len(y))
        back = gating_reference.unpermute(y, rows, None), gating_reference.unpermute(y, rows, weights)
        return there, back, gating_reference.unpermute_backward(dy, y, rows, weights)

    for dtype in DTYPES:
        for tokens, k, experts, dim in (
            (0, 2, 3, 5), (1, 1, 1, 1), (5, 3, 4, 0), (65, 2, 8, 33), (129, 2, 8, 64), (17, 3, 4, 264),
            (2, 1, 2, 11328), *([(1031, 2, 64, 1021)] * large),
        ):  # fmt: skip
            indices = choices(tokens, k, experts)
            for capacity in (None, 0, tokens * k // experts + 1):
                at = gating_reference.positions_in_expert(indices, experts, capacity, True)
                rows = gating.expert_rows(indices, gating.Positions(*at, capacity), padded=capacity is not None)
                for special in (False, True):
                    total = tokens * k if capacity is None else experts * capacity
                    x, y, dy = (
                        values((n, dim), i, special=special).to(dtype) for i, n in enumerate((tokens, total, tokens))
                    )
                    weights = values((tokens, k), 3).to(FP32 if special else dtype)
                    what = f"{dtype}, {tokens} x {k} of {dim}, capacity {capacity}, special={special}"
                    args = (x, y, dy, weights, rows)
                    yield Case(what=what, args=args, operation=operation, reference=reference)
