"""Gradients through what is rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Straight(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept; so torch.func may take gradients through it."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, with dL/dvalue = dL/drounded: the straight-through estimator (Bengio, Léonard, Courville 2013,
    section 4), for every quantiser here, ternary and binary ones too.

    No element lies outside of the range of its group, so that nothing is clipped; where ends are given from outside,
    the gradient of what is clipped goes through as well.
    """
    if not (torch.is_grad_enabled() and value.requires_grad):
        return rounded.detach()
    found: Tensor = _Straight.apply(value, rounded.detach())
    return found


def mixed(value: Tensor, rounded: Tensor, share: float) -> Tensor:
    """share·rounded + (1 - share)·value, bit for bit ``rounded`` at 1."""
    return rounded if share >= 1.0 else rounded * share + value * (1.0 - share)
