"""Powers of gradients, of which norms are made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def power_of(chunk: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Σ |g|^p, or the largest |g| for p = infinity; computed in fp64, where the squares of shorter types are exact."""
    if math.isinf(p):
        largest: torch.Tensor = torch.linalg.vector_norm(chunk, p)
        return largest.double()
    if p == 2.0:
        return sums_of_squares([chunk])[0]
    sizes = chunk.abs()
    return sizes.sum(dtype=torch.float64) if p == 1.0 else sizes.double().pow_(p).sum()


def sums_of_squares(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """By the kernel, whose bits depend on neither threads nor instruction set, where zoo-kernels is installed."""
    try:
        from zoo.kernels.norm.ops import sum_squares
    except ImportError:
        return torch.stack([chunk.double().square().sum() for chunk in chunks])
    found: torch.Tensor = sum_squares(chunks)
    return found
