"""Uniform quantisation to b bits, in the order of operations of zoo.kernels.quantise, so that both give the same bits.

Symbols: w (G, n) groups in fp32; Q the largest integer; u (G, n) in [0, 1) or None.

A group whose span is below Q/3.4e38, so that Q/span overflows fp32, has no steps: what is not its lower end (or 0)
becomes an end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric(w: Tensor, bits: int, u: Tensor | None = None, *, span: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """v = s·q, s = max|w|/Q of each group, Q = 2^(bits-1) - 1, q = round(w·Q/max|w|) in [-Q, Q].

    round: to the nearest, of two as near ones to the even one; with u: floor(w·Q/max|w| + u). A group of zeros stays.

    Args:
        span: (G, 1) in the place of max|w|; what is outside becomes the nearer end.

    Returns:
        v, (G, n), and the spans max|w|, (G, 1).
    """
    limit = float(2 ** (bits - 1) - 1)
    if span is None:
        low, high = torch.aminmax(w, dim=1, keepdim=True)
        span = torch.maximum(low.neg_(), high)
    return _rounded(w, span, limit, -limit, u).mul_(span / torch.full_like(span, limit)), span


def asymmetric(w: Tensor, bits: int, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """v = s·q + lo, lo = min w, s = (max w - lo)/(2^bits - 1) of each group, q = round((w - lo)/s) in [0, 2^bits - 1].

    A group of equal elements stays. Rounding as in :func:`symmetric`.

    Returns:
        v, (G, n), and the spans max w - lo, (G, 1).
    """
    lo, hi = torch.aminmax(w, dim=1, keepdim=True)
    return within(w, lo, hi, bits, u)


def within(w: Tensor, lo: Tensor, hi: Tensor, bits: int, u: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`asymmetric` between given ends, which broadcast with w; what is outside becomes the nearer end."""
    limit = float(2**bits - 1)
    span = hi - lo
    return _rounded(w - lo, span, limit, 0.0, u).mul_(span / torch.full_like(span, limit)).add_(lo), span


def _rounded(w: Tensor, span: Tensor, limit: float, least: float, u: Tensor | None) -> Tensor:
    scaled = w * (torch.full_like(span, limit) / span)
    if u is not None:
        scaled.add_(u).floor_()
    # 0 · infinity where the span is 0; a NaN span makes v a NaN by its scale.
    return scaled.nan_to_num_(nan=0.0).clamp_(least, limit).round_()
