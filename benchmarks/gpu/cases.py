"""Tensors for the checks: many magnitudes, numbers that are likely to go wrong, odd addresses; and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, -3e-39, 1e-30, 3e38, 6e-8, 65519.0, 65520.0]


def values(shape: Sequence[int] | int, seed: int, *, special: bool = False, positive: bool = False) -> Tensor:
    """fp32 numbers of many magnitudes; with ``special`` one in 64 is infinite, NaN, zero, subnormal or huge."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-12, 4, shape, generator=generator).float())
    if special and x.numel():
        where = torch.rand(shape, generator=generator) < 1 / 64
        x = torch.where(where, torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)], x)
    return x.abs() if positive else x


def placed(x: Tensor, device: torch.device | str, offset: int = 0) -> Tensor:
    """A copy of ``x`` on the device, ``offset`` elements after the beginning of its memory."""
    room = torch.empty(x.numel() + offset, dtype=x.dtype, device=device)
    room[offset:].copy_(x.reshape(-1))
    return room[offset:].view(x.shape)


def moved(given: Any, device: torch.device | str, offset: int = 0) -> Any:
    """The same with every tensor of nested lists and tuples."""
    if isinstance(given, Tensor):
        return placed(given, device, offset)
    return type(given)(moved(x, device, offset) for x in given) if isinstance(given, (list, tuple)) else given


def flat(found: Any) -> list[Tensor]:
    """All tensors of nested lists and tuples; None is left out."""
    if isinstance(found, Tensor):
        return [found]
    return [t for x in found for t in flat(x)] if isinstance(found, (list, tuple)) else []


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in a bit; any NaN equals any NaN, zeros keep their sign. All, if not alike."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return max(a.numel(), b.numel(), 1)
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[a.element_size()]
    equal = a.contiguous().view(bits) == b.contiguous().view(bits)
    if a.is_floating_point():
        equal |= a.isnan() & b.isnan()
    return int((~equal).sum())


def ordered_sum_squares(x: Tensor) -> Tensor:
    """Σx² in fp64 in the order of ``common/squares.h``: 16 lanes of parts of 65,536, in order."""
    part, lanes = 65536, 16
    square = x.reshape(-1).double().square()
    parts = -(-square.numel() // part)
    padded = torch.nn.functional.pad(square, (0, parts * part - square.numel())).view(parts, part // lanes, lanes)
    sums = padded.new_zeros(parts, lanes)
    for i in range(min(part, square.numel() + lanes) // lanes):
        sums = sums + padded[:, i]
    total = padded.new_zeros(())
    of_part = padded.new_zeros(parts)
    for k in range(lanes):
        of_part = of_part + sums[:, k]
    for p in range(parts):
        total = total + of_part[p]
    return total
