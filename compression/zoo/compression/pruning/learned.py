"""Masks by learned scores: movement pruning, Sanh et al. 2020 (arXiv:2005.07683), section 4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(scores: Tensor, mask: Tensor) -> Tensor:
        # A score that is NaN has no rank: its mask is NaN too, so that the loss shows it.
        return torch.where(scores.isnan(), scores, mask.to(scores.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept; so torch.func may take gradients through it."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def masked_by(scores: Tensor, mask: Tensor) -> Tensor:
    """M(S) as numbers, with dM/dS = 1: for W' = M·W, dL/dS = dL/dW'·W, of what is masked too, which may come back.

    Args:
        scores: S, of floating point.
        mask: what stays by them, bool, of the same shape.
    """
    found: Tensor = _StraightThrough.apply(scores, mask)
    return found
