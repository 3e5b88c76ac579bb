"""Root mean square normalisation in plain torch, operation by operation as ``rms_norm.h`` writes it."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import wide
from zoo.kernels.sums import lane_sum, root

Tensor = torch.Tensor


def root_of_mean(s: Tensor, eps: float) -> Tensor:
    """ρ (..., 1) of s (..., D), which is fp32 or fp64."""
    return (1.0 / root(lane_sum(s * s) * (1.0 / s.shape[-1]) + eps)).unsqueeze(-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """y of x (..., D)."""
    s, w = wide(x), wide(weight)
    return ((s * root_of_mean(s, eps)) * (1.0 + w if plus_one else w)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """(y, x + residual)."""
    total = (wide(x) + wide(residual)).to(x.dtype)
    return rms_norm(total, weight, eps, plus_one), total
