"""Bias, dropout and residual in plain torch, as ``bias_dropout_residual.h`` writes it: oracle and fallback."""

from __future__ import annotations

import math

import torch

from zoo.kernels.elementary import wide
from zoo.kernels.philox import words
from zoo.kernels.sums import column_sum

Tensor = torch.Tensor


def bias_dropout_residual(x: Tensor, bias: Tensor, residual: Tensor, p: float, seed: int, offset: int) -> Tensor:
    """residual + k·(x + bias)."""
    kept = dropped(wide(x) + wide(bias), p, seed, offset)
    return (wide(residual) + kept).to(x.dtype)


def bias_dropout_residual_backward(
    grad_out: Tensor, bias: Tensor, p: float, seed: int, offset: int
) -> tuple[Tensor, Tensor]:
    """(dx, db)."""
    dx = dropped(wide(grad_out), p, seed, offset)
    return dx.to(grad_out.dtype), column_sum(dx).to(bias.dtype)


def dropout(x: Tensor, p: float, seed: int, offset: int, first: int) -> Tensor:
    """k·x, whose first element is the one at place ``first``."""
    return dropped(wide(x), p, seed, offset, first).to(x.dtype)


def dropped(x: Tensor, p: float, seed: int, offset: int, first: int = 0) -> Tensor:
    """k·x: 0 where the random word of the element is below p·2^32, else x/(1 - p)."""
    threshold = math.ceil(p * 2**32)
    if threshold == 0:
        return x.clone()
    if threshold == 2**32:
        return torch.zeros_like(x)
    keep = words(seed, offset, x.numel(), x.device, first=first) >= threshold
    return torch.where(keep.view(x.shape), x * (1.0 / (1.0 - p)), 0.0)
