"""``deepspeed.runtime.zero.tiling`` and ``.linear``: what :mod:`zoo.nn` does not have under the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zoo import nn
from zoo.deepspeed.adapters import told_as
from zoo.nn.linear import linear


class TiledLinear(nn.TiledLinear):
    """:class:`zoo.nn.TiledLinear`, whose ValueErrors are RuntimeErrors too, as DeepSpeed's are."""

    __init__ = told_as(RuntimeError)(nn.TiledLinear.__init__)


class TiledLinearReturnBias(TiledLinear):
    """As :class:`zoo.nn.TiledLinear`, of tiles that return (output without bias, bias or None); so does it itself.

    With ``combine_out_splits=False`` both are lists, the second one None where no tile has a bias.
    """

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """(*, in_features) → (*, out_features) and (out_features,)."""
        pieces = self._split(x)
        outputs, biases = [], []
        for row in range(len(self.out_sizes)):
            total, bias = self.tile(row, 0)(pieces[0])
            for column in range(1, len(pieces)):
                more, its_bias = self.tile(row, column)(pieces[column])
                total, bias = total + more, its_bias if bias is None else bias
            outputs.append(total)
            biases.append(bias)
        there = [bias for bias in biases if bias is not None]
        if not self.combine_out_splits:
            return outputs, there or None
        return torch.cat(outputs, dim=-1), torch.cat(there, dim=-1) if there else None


class LinearModuleForZeroStage3(nn.MemoryEfficientLinear):
    """:class:`zoo.nn.MemoryEfficientLinear`: no cast copy of the weight is kept for backward under autocast."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


def zero3_linear_wrap(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b; see :func:`zoo.nn.linear.linear`."""
    return linear(input, weight, bias)


class LinearFunctionForZeroStage3:
    """``.apply(input, weight, bias)``: :func:`zero3_linear_wrap`."""

    apply = staticmethod(zero3_linear_wrap)


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` as it is."""
    return func


_KIND = "cuda" if torch.cuda.is_available() else "cpu"
autocast_custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=_KIND)
"""For the forward of an autograd function: see ``torch.amp.custom_fwd``."""
autocast_custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=_KIND)
"""For its backward: see ``torch.amp.custom_bwd``."""
