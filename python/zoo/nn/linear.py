"""Linear layers that keep no copy of their weight for backward.

y = x Wᵀ + b, with backward ∂x = g W, ∂W = gᵀ x, ∂b = Σ g, needs W and x again. torch keeps W itself. At ZeRO stage 3
that costs nothing in zoo: what autograd holds is a view of the bucket's buffer, whose storage is emptied on release and
filled again before the unit's backward. Under ``torch.autocast`` it does cost: what autograd then holds is a copy of W
in the lower precision, so after forward the copies of *all* layers are there, 2Ψ bytes that no partitioning removes,
and autocast's own cache holds them until its context ends. :func:`memory_efficient_linear` is for that case alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _CastLinear(torch.autograd.Function):
    """x (*, in) in the lower precision, W (out, in) and b (out) in theirs. Keeps x and the parameter; casts W twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2) if grad.ndim > 1 else grad.unsqueeze(0)
        dx = dw = db = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = grad @ weight.to(grad.dtype)
            if ctx.needs_input_grad[1]:
                dw = (flat.t() @ x.reshape(-1, x.shape[-1])).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                db = flat.sum(0).to(ctx.bias_dtype)
        return dx, dw, db


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` that, under autocast, keeps x and the parameter for backward, and no cast copy of it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return F.linear(x, weight, bias)
    dtype = torch.get_autocast_dtype(device)
    with torch.autocast(device, enabled=False):
        out: torch.Tensor = _CastLinear.apply(x.to(dtype), weight, bias)
    return out


class MemoryEfficientLinear(nn.Linear):
    """``nn.Linear`` that, under autocast, keeps its input and its parameter for backward, and no cast copy of it.

    The results are those of ``nn.Linear`` under autocast. The price is a second cast of W in backward. Without
    autocast it is ``nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(*, in_features) → (*, out_features)."""
        return linear(input, self.weight, self.bias)


class LinearSwap:
    """What :func:`memory_efficient_linear` changed; ``undo()`` or the end of a ``with`` block changes it back."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers
        for layer in layers:
            layer.__class__ = MemoryEfficientLinear

    @property
    def num_layers(self) -> int:
        """How many layers are changed now."""
        return len(self._layers)

    def undo(self) -> None:
        """Make the layers ``nn.Linear`` again; a second call does nothing."""
        layers, self._layers = self._layers, []
        for layer in layers:
            layer.__class__ = nn.Linear

    def __enter__(self) -> LinearSwap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


def memory_efficient_linear(model: nn.Module) -> LinearSwap:
    """Let every ``nn.Linear`` of ``model`` be a :class:`MemoryEfficientLinear`; worth it with autocast at stage 3 only.

    Only ``nn.Linear`` itself is changed, not classes derived from it. Parameters, names and hooks stay, so it may
    be done before or after the construction of an optimizer. Returns what undoes it.
    """
    return LinearSwap([module for module in model.modules() if type(module) is nn.Linear])
