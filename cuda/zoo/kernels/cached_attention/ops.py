"""Attention over a cache as a function of tensors: native where there is a kernel, else the reference."""

from __future__ import annotations

import torch

from zoo.kernels.cached_attention import reference
from zoo.kernels.checks import check_floating
from zoo.kernels.operators import Operator

Tensor = torch.Tensor


@torch.no_grad()
def cached_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, *, scale: float) -> Tensor:
    """softmax(c·q·kᵀ)·v over the keys that a query sees; the bits of a query depend on nothing else. No gradient.

    Vaswani et al. 2017, section 3.2.1; ``cached_attention.h`` has the order of the sums. A token that is generated has
    the bits of the same token in a prompt, in any batch, with padding or without.

    Args:
        q: (B, H, T, D), fp32, bf16 or fp16 (fp64 runs in the reference).
        keys, values: (B, G, n, D), of the dtype of q; G divides H, and head h reads group h // (H / G).
        mask: (B, T, n), bool: which keys a query sees; None: key j where j <= n - T + t.
        scale: c.

    All may have any strides, but D is contiguous.

    Returns:
        (B, T, H·D), of the dtype of q; zeros of a query that sees nothing.

    Raises:
        ValueError: a dtype, shape, device or layout that cannot be; with the numbers.
    """
    y: Tensor = _forward(q, keys, values, mask, scale, check=lambda: _check(q, keys, values, mask))
    return y


_forward = Operator(
    "cached_attention", reference.cached_attention,
    fake=lambda q, *_: q.new_empty((q.shape[0], q.shape[2], q.shape[1] * q.shape[3])),
)  # fmt: skip


def _check(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
    check_floating("q", q)
    for name, t in (("q", q), ("keys", keys)):
        if t.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must have 4 dims.")
    batch, heads, tokens, dim = q.shape
    groups, length = keys.shape[1:3]
    if groups < 1 or heads % groups:
        raise ValueError(f"q has {heads} heads and keys have {groups}; the latter must divide the former.")
    for name, t in (("keys", keys), ("values", values)):
        if t.dtype is not q.dtype:
            raise ValueError(f"{name} is {t.dtype}; it must be {q.dtype}.")
        if t.shape != (batch, groups, length, dim):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; it must be {(batch, groups, length, dim)}.")
    for name, t in (("q", q), ("keys", keys), ("values", values)):
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}; all tensors of a call must be on one device, here {q.device}.")
        if dim > 1 and t.numel() and t.stride(3) != 1:
            raise ValueError(f"{name} has strides {t.stride()}; its last dim must be contiguous.")
    if mask is not None:
        if mask.dtype is not torch.bool:
            raise ValueError(f"mask is {mask.dtype}; it must be torch.bool.")
        if mask.shape != (batch, tokens, length):
            raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be {(batch, tokens, length)}.")
