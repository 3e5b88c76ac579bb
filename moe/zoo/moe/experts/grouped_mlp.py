"""Whole multi-layer perceptrons of groups of rows on the CPU: what lies between the two matrices stays in the cache.

Legend: R rows, E groups, D, H; x (R, D), up (E, D, W) with W = H, or 2H where a gate G lies before U; down (E, H, D);
counts (E,): rows of each group, one group after the other.

A block of rows of one group goes through both products before the next one begins. Kept for backward is only
p = x up + b, from which the activation is computed again. So forward allocates (R, W) and (R, D), and backward, beside
gradients, room for the rows of the largest group: new memory costs a page fault for every 4 KiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zoo.kernels.activation import FORMS, activate_, activate_backward_
from zoo.kernels.storage import in_huge_pages
from zoo.moe.experts.grouped_linear import segments

Tensor = torch.Tensor

BLOCK = 1024
"""Rows that go through both products at once, at most."""


def runs(x: Tensor, activation: object) -> bool:
    """Whether :func:`grouped_mlp` is for this."""
    return x.device.type == "cpu" and activation in FORMS


def grouped_mlp(
    x: Tensor, up: Tensor, down: Tensor, counts: Tensor, up_bias: Tensor | None, down_bias: Tensor | None, *,
    activation: str, gated: bool,
) -> Tensor:  # fmt: skip
    """y_i = φ(p_i) down_e + b_e with p_i = x_i up_e + b_e, or φ(g_i) ⊙ u_i for φ(p_i) where (g_i, u_i) = p_i; (R, D).

    Rows after the last group are 0. Can be differentiated once.
    """
    found: Tensor = torch.ops.zoo_moe.grouped_mlp(x, up, down, counts, up_bias, down_bias, activation, gated)[0]
    return found


@torch.library.custom_op("zoo_moe::grouped_mlp", mutates_args=())
def _mlp(
    x: Tensor, up: Tensor, down: Tensor, counts: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, hidden = x.shape[0], down.shape[1]
    pre, y = _room(x, rows, up.shape[2]), _room(x, rows, down.shape[2])
    scratch = x.new_empty(min(BLOCK, rows), hidden)
    for e, begin, end in _blocks(counts):
        p, a = pre[begin:end], scratch[: end - begin]
        _product(x[begin:end], up[e], None if up_bias is None else up_bias[e], p)
        activate_(a, p, activation, gated=gated)
        _product(a, down[e], None if down_bias is None else down_bias[e], y[begin:end])
    for rest in (y, pre):
        rest[int(counts.sum()) :].zero_()
    return y, pre


@torch.library.custom_op("zoo_moe::grouped_mlp_backward", mutates_args=())
def _mlp_backward(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, counts: Tensor, pre: Tensor, activation: str, gated: bool,
    bias: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide, hidden = up.shape[2], down.shape[1]
    dx, dup, ddown = _room(x, *x.shape), _room(up, *up.shape), _room(down, *down.shape)
    dup_bias = x.new_zeros((up.shape[0], wide) if bias[0] else 0)
    ddown_bias = x.new_zeros((up.shape[0], down.shape[2]) if bias[1] else 0)
    most = max((end - begin for _, begin, end in segments(counts)), default=0)
    a, dp, da = x.new_empty(most, hidden), x.new_empty(most, wide), x.new_empty(min(BLOCK, most), hidden)
    for e, begin, end in segments(counts):
        for first, last in _cuts(begin, end):
            rows, here, of_block = slice(first, last), slice(first - begin, last - begin), da[: last - first]
            torch.mm(dy[rows], down[e].t(), out=of_block)
            activate_backward_(a[here], dp[here], of_block, pre[rows], activation, gated=gated)
            torch.mm(dp[here], up[e].t(), out=dx[rows])
        # Over all rows at once: sums of blocks would be rounded to 16 bits each.
        of_group, n = slice(begin, end), end - begin
        torch.mm(a[:n].t(), dy[of_group], out=ddown[e])
        torch.mm(x[of_group].t(), dp[:n], out=dup[e])
        if bias[0]:
            torch.sum(dp[:n], 0, out=dup_bias[e])
        if bias[1]:
            torch.sum(dy[of_group], 0, out=ddown_bias[e])
    dx[int(counts.sum()) :].zero_()
    for e, count in enumerate(counts.tolist()):
        if not count:
            dup[e].zero_()
            ddown[e].zero_()
    return dx, dup, ddown, dup_bias, ddown_bias


def _room(like: Tensor, *shape: int) -> Tensor:
    """New memory, contiguous."""
    return in_huge_pages(like.new_empty(shape))


def _blocks(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, begin, end) of blocks of rows of one group."""
    for e, begin, end in segments(counts):
        for first, last in _cuts(begin, end):
            yield e, first, last


def _cuts(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in as few parts of at most ``BLOCK`` as there can be, of about the same size: products of few rows
    are slow."""
    size = -(-(end - begin) // -(-(end - begin) // BLOCK))
    for at in range(begin, end, size):
        yield at, min(at + size, end)


def _product(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)


@_mlp.register_fake
def _(
    x: Tensor, up: Tensor, down: Tensor, counts: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, gated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape[0], down.shape[2]), x.new_empty(x.shape[0], up.shape[2])


@_mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, up: Tensor, down: Tensor, counts: Tensor, pre: Tensor, activation: str, gated: bool,
    bias: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dup_bias = x.new_empty((up.shape[0], up.shape[2]) if bias[0] else 0)
    ddown_bias = x.new_empty((up.shape[0], down.shape[2]) if bias[1] else 0)
    return torch.empty_like(x), torch.empty_like(up), torch.empty_like(down), dup_bias, ddown_bias


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, up, down, counts, up_bias, down_bias, ctx.activation, ctx.gated = inputs
    ctx.bias = [up_bias is not None, down_bias is not None]
    ctx.save_for_backward(x, up, down, counts, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 8
    x, up, down, counts, pre = ctx.saved_tensors
    dx, dup, ddown, dup_bias, ddown_bias = torch.ops.zoo_moe.grouped_mlp_backward(
        dy.contiguous(), x, up, down, counts, pre, ctx.activation, ctx.gated, ctx.bias
    )
    biases = (dup_bias if ctx.bias[0] else None, ddown_bias if ctx.bias[1] else None)
    return dx, dup, ddown, None, *biases, None, None


_mlp.register_autograd(_backward, setup_context=_context)
