"""Layer normalisation in plain torch, operation by operation as ``layer_norm.h`` writes it: oracle and fallback.

Arithmetic is fp32, or fp64 where x is fp64; statistics are of that type too.
"""

from __future__ import annotations

import torch

from zoo.kernels.elementary import wide
from zoo.kernels.sums import column_sum, lane_sum, root

Tensor = torch.Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of x (..., D)."""
    s = wide(x)
    inverse = 1.0 / x.shape[-1]
    mean = lane_sum(s) * inverse
    centred = s - mean.unsqueeze(-1)
    rstd = 1.0 / root(lane_sum(centred * centred) * inverse + eps)
    y = (centred * rstd.unsqueeze(-1)) * wide(weight) + wide(bias)
    return y.to(x.dtype), mean, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean, rstd)."""
    total = (wide(x) + wide(residual)).to(x.dtype)
    y, mean, rstd = layer_norm(total, weight, bias, eps)
    return y, total, mean, rstd


def layer_norm_backward(
    grad_y: Tensor, grad_sum: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dw, db)."""
    dy, inverse, rho = wide(grad_y), 1.0 / total.shape[-1], rstd.unsqueeze(-1)
    hat = (wide(total) - mean.unsqueeze(-1)) * rho
    g = dy * wide(weight)
    alpha = (lane_sum(g) * inverse).unsqueeze(-1)
    beta = (lane_sum(g * hat) * inverse).unsqueeze(-1)
    dx = ((g - alpha) - hat * beta) * rho
    if grad_sum is not None:
        dx = dx + wide(grad_sum)
    return dx.to(total.dtype), column_sum(dy * hat).to(weight.dtype), column_sum(dy).to(weight.dtype)
