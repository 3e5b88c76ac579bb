"""One multi-layer perceptron an expert, on rows that are sorted by expert.

Legend: R rows, L experts, D, H; x (R, D), counts (L,): rows of each expert, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from zoo.moe.experts import grouped_mlp
from zoo.moe.experts.grouped_linear import grouped_linear

Tensor = torch.Tensor


class Linear(NamedTuple):
    """y_i = x_i W_e + b_e + Σ s · (x_i A_e) B_e.

    Attributes:
        weight: (L, D, H), or (L, H, D) if ``transposed``. bias: (L, H).
        low_rank: (A, B, s) of adapters, A (L, D, r) and B (L, r, H).
    """

    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False
    low_rank: Sequence[tuple[Tensor, Tensor, float]] = ()

    def of(self, which: slice | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """(L, D, H) and (L, H) of all experts or of some, in this dtype."""
        w = _some(self.weight, which, dtype)
        b = None if self.bias is None else _some(self.bias, which, dtype)
        return w.transpose(1, 2) if self.transposed else w, b

    def __call__(self, x: Tensor, counts: Tensor, which: slice | None) -> Tensor:
        """(R, H) of (R, D), whose ``counts`` are those of the experts ``which``."""
        w, b = self.of(which, x.dtype)
        y = grouped_linear(x, w, counts, b)
        for first, second, scale in self.low_rank:
            inner = grouped_linear(x, _some(first, which, x.dtype), counts)
            y = y + grouped_linear(inner, _some(second, which, x.dtype), counts) * scale
        return y


def perceptron(
    x: Tensor, counts: Tensor, which: slice | None, up: Linear, down: Linear, between: Callable[[Tensor], Tensor], *,
    named: str | None, gated: bool,
) -> Tensor:  # fmt: skip
    """down(between(up(x))), (R, D).

    Args:
        which: of some of the experts here, whose counts are given.
        between: φ, or :func:`gate` by it.
        named: the name of φ where :mod:`.grouped_mlp` may have it, which then computes all at once.
    """
    if grouped_mlp.runs(x, named) and not up.low_rank and not down.low_rank:
        (w, b), (v, c) = up.of(which, x.dtype), down.of(which, x.dtype)
        return grouped_mlp.grouped_mlp(x, w, v, counts, b, c, activation=str(named), gated=gated)
    return down(between(up(x, counts, which)), counts, which)


def gate(h: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """φ(g) ⊙ u of (R, 2H), whose halves are g and u."""
    g, u = h.chunk(2, -1)
    return activation(g) * u


def _some(weight: Tensor, which: slice | None, dtype: torch.dtype) -> Tensor:
    return (weight if which is None else weight[which]).to(dtype)  # a slice of all would copy its gradient once more
