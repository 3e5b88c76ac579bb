"""Philox4x32-10 in plain torch: the words of ``common/philox.h``."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def words(seed: int, offset: int, count: int, device: torch.device | str = "cpu", *, first: int = 0) -> torch.Tensor:
    """The random words of elements first, ..., first + count - 1: int64 (count,), each in [0, 2^32)."""
    index = torch.arange(first // 4, -(-(first + count) // 4), dtype=torch.int64, device=device)
    return blocks(seed, offset, index).flatten()[first % 4 :][:count]


def blocks(seed: int, offset: int, index: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 of the counters (index, offset) under the key seed, 64 bits each: int64 (..., 4) in [0, 2^32)."""
    c0, c1 = index & _LOW, index >> 32 & _LOW
    c2, c3 = torch.full_like(index, offset & _LOW), torch.full_like(index, offset >> 32 & _LOW)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        # Products of 64 bits wrap to negative numbers; their bits are right.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack([c0, c1, c2, c3], -1)
