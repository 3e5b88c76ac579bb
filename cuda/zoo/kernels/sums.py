"""Sums of the references, in the order of ``common/lanes.h``: the same bits as the kernels."""

from __future__ import annotations

import torch

LANES = 64
PART_ROWS = 64

Tensor = torch.Tensor


def lane_sum(x: Tensor) -> Tensor:
    """Σ over the last dim, element i in lane i mod 64, the lanes folded by halves; shape ``x.shape[:-1]``."""
    n = x.shape[-1]
    chunks = -(-n // LANES)
    padded = torch.nn.functional.pad(x, (0, chunks * LANES - n)).reshape(*x.shape[:-1], chunks, LANES)
    lanes = x.new_zeros((*x.shape[:-1], LANES))
    for i in range(chunks):
        lanes = lanes + padded[..., i, :]
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


def column_sum(x: Tensor) -> Tensor:
    """Σ over all dims but the last: parts of 64 rows in order, then the parts in order; shape ``x.shape[-1:]``."""
    dim = x.shape[-1]
    rows = x.numel() // dim if dim else 0
    parts = -(-rows // PART_ROWS)
    padded = torch.nn.functional.pad(x.reshape(rows, dim), (0, 0, 0, parts * PART_ROWS - rows))
    padded = padded.reshape(parts, PART_ROWS, dim)
    sums = x.new_zeros((parts, dim))
    for i in range(min(PART_ROWS, rows)):
        sums = sums + padded[:, i]
    total = x.new_zeros(dim)
    for p in range(parts):
        total = total + sums[p]
    return total


def root(x: Tensor) -> Tensor:
    """√x, correctly rounded: torch's own in fp32 may be off by one unit in the last place."""
    return x.double().sqrt().to(x.dtype)
