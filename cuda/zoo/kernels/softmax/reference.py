"""Softmax in plain torch, operation by operation as ``softmax.h`` writes it: oracle and fallback."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import exp, wide
from zoo.kernels.sums import lane_sum

Tensor = torch.Tensor


def softmax(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """softmax(scale·x + mask) over the last dim."""
    v = wide(x) * scale
    if mask is not None:
        v = v + mask.to(v.dtype)
    if causal:
        queries, keys = x.shape[-2:]
        hidden = torch.ones((queries, keys), dtype=torch.bool, device=x.device).triu(keys - queries + 1)
        v = torch.where(hidden, -torch.inf, v)
    if not x.shape[-1]:
        return torch.empty_like(x)
    maximum = v.amax(-1, keepdim=True)
    e = exp(v - torch.where(maximum == -torch.inf, 0.0, maximum))
    total = lane_sum(e).unsqueeze(-1)
    return (e * torch.where(total == 0.0, 0.0, 1.0 / total)).to(x.dtype)


def softmax_backward(grad_y: Tensor, y: Tensor, scale: float) -> Tensor:
    """dx."""
    wide_y, dy = wide(y), wide(grad_y)
    return ((wide_y * (dy - lane_sum(dy * wide_y).unsqueeze(-1))) * scale).to(y.dtype)
