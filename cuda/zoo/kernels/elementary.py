"""What the references compute in, and their exp and normal distribution: ``common/elementary.h``, bit for bit in fp32.

In fp64 they are torch's own.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor
EXP = (0.001381455804221332, 0.008368736132979393, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552)
TAIL = (
    -0.02916399948298931, 0.1440611481666565, -0.25590258836746216, 0.15939374268054962, -0.02326440066099167,
    0.10557503998279572, 0.11981543898582458, 0.13986434042453766, 0.13962125778198242,
)  # fmt: skip


def wide(x: Tensor) -> Tensor:
    """As the references compute: in fp32, or in fp64 where that is given."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def exp(x: Tensor) -> Tensor:
    """e^x, in fp32 to 2 units in the last place."""
    if x.dtype is torch.float64:
        return x.exp()
    y = torch.where(x < -104.0, -104.0, x)
    y = torch.where(y > 89.0, 89.0, y)
    shifted = y * 1.44269502 + 12582912.0
    n = shifted - 12582912.0
    i = shifted.view(torch.int32) - 0x4B400000
    r = (y - n * 0.693359375) + n * 0.000212194440
    e = 1.0 + (r + (r * r) * _polynomial(EXP, r))
    half = i >> 1
    return (e * _power(half)) * _power(i - half)


def sigmoid(x: Tensor) -> Tensor:
    """1/(1 + e^-x)."""
    return 1.0 / (1.0 + exp(-x))


def normal_tail(a: Tensor) -> tuple[Tensor, Tensor]:
    """(1 - Φ(a), e^(-a²/2)) for a >= 0."""
    density = exp(-0.5 * (a * a))
    if a.dtype is torch.float64:
        return 0.5 * torch.erfc(a / math.sqrt(2)), density
    t = 1.0 / (1.0 + 0.35 * a)
    return density * (_polynomial(TAIL, t) * t), density


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p = p * x + c
    return p


def _power(i: Tensor) -> Tensor:
    return ((i + 127) << 23).view(torch.float32)
