"""Activations in plain torch, operation by operation as ``activation.h`` writes it: oracle and fallback."""

from __future__ import annotations

import torch

from zoo.kernels.bias_gelu.reference import gelu
from zoo.kernels.elementary import sigmoid, wide

Tensor = torch.Tensor


def activate(pre: Tensor, activation: str, gated: bool) -> Tensor:
    """a."""
    z, u = _halves(pre, gated)
    y, _ = _value_and_slope(z, activation)
    return (y if u is None else y * u).to(pre.dtype)


def activate_backward(grad_a: Tensor, pre: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    """(a, dp)."""
    (z, u), da = _halves(pre, gated), wide(grad_a)
    y, slope = _value_and_slope(z, activation)
    if u is None:
        return y.to(pre.dtype), (da * slope).to(pre.dtype)
    return (y * u).to(pre.dtype), torch.cat([(da * u) * slope, da * y], -1).to(pre.dtype)


def _halves(pre: Tensor, gated: bool) -> tuple[Tensor, Tensor | None]:
    if not gated:
        return wide(pre), None
    half = pre.shape[-1] // 2
    return wide(pre[..., :half]), wide(pre[..., half:])


def _value_and_slope(z: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if activation == "silu":
        s = sigmoid(z)
        return z * s, s + z * (s * (1.0 - s))
    if activation == "relu":
        return torch.where(z < 0.0, 0.0, z), torch.where(z <= 0.0, 0.0, torch.ones_like(z))
    return gelu(z, tanh=activation == "gelu_tanh")
