"""Attention over a cache in plain torch, with the bits of the kernels."""

from __future__ import annotations

import torch

from zoo.kernels.elementary import exp, wide
from zoo.kernels.sums import lane_sum
from zoo.kernels.thin_linear.reference import multiply_add, product

Tensor = torch.Tensor


def cached_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """See :func:`zoo.kernels.cached_attention.cached_attention`."""
    batch, heads, tokens, dim = q.shape
    groups, length = keys.shape[1:3]
    y = wide(q).new_zeros(batch, tokens, groups, heads // groups, dim)
    for b in range(batch):
        for t in range(tokens):
            seen = torch.arange(length, device=q.device) <= length - tokens + t if mask is None else mask[b, t]
            (shown,) = seen.nonzero(as_tuple=True)
            if len(shown):
                k, v = wide(keys[b, :, shown]), wide(values[b, :, shown])
                y[b, t] = _of_query(wide(q[b, :, t]).view(groups, -1, dim), k, v, scale)
    return y.flatten(2).to(q.dtype)


def _of_query(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """(G, H/G, D) of q (G, H/G, D), keys and values (G, n, D)."""
    scores = torch.stack([product(a, b) for a, b in zip(q, keys, strict=True)]) * scale
    e = exp(scores - scores.amax(-1, keepdim=True))
    y = torch.zeros_like(q)
    for i in range(keys.shape[1]):
        y = multiply_add(e[..., i, None], values[:, None, i], y)
    return y * (1.0 / lane_sum(e)).unsqueeze(-1)
