"""Bias and GELU in plain torch, operation by operation as ``bias_gelu.h`` writes it: oracle and fallback."""

from __future__ import annotations

import math

import torch

from zoo.kernels.elementary import normal_tail, sigmoid, wide
from zoo.kernels.sums import column_sum

Tensor = torch.Tensor


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """y = z·Φ(z), z = x + bias."""
    return gelu(wide(x) + wide(bias), tanh=tanh)[0].to(x.dtype)


def bias_gelu_backward(grad_y: Tensor, x: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """(dx, db)."""
    dx = wide(grad_y) * gelu(wide(x) + wide(bias), tanh=tanh)[1]
    return dx.to(x.dtype), column_sum(dx).to(bias.dtype)


def gelu(z: Tensor, *, tanh: bool) -> tuple[Tensor, Tensor]:
    """z·Φ(z) and its derivative, of fp32 or fp64."""
    if tanh:
        a, b, b3 = _constants(z)
        square = z * z
        s = sigmoid(z * (a + b * square))
        return z * s, s + z * ((s * (1.0 - s)) * (a + b3 * square))
    phi, density = _phi(z)
    slope = phi + z * (density * (0.39894228 if z.dtype is torch.float32 else 1 / math.sqrt(2 * math.pi)))
    return z * phi, slope


def _phi(z: Tensor) -> tuple[Tensor, Tensor]:
    tail, density = normal_tail(torch.where(z < 0, -z, z))
    return torch.where(z < 0, tail, 1.0 - tail), density


def _constants(z: Tensor) -> tuple[float, float, float]:
    if z.dtype is torch.float32:
        return 1.5957691, 0.07135481, 0.21406444
    a = 2 * math.sqrt(2 / math.pi)
    return a, 0.044715 * a, 3 * 0.044715 * a
