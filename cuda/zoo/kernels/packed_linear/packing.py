"""Packed weights: what ``zoo.kernels.quantise`` makes of each row, in the order that the kernels read; and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from zoo.kernels.quantise import dequantise_, dequantise_asymmetric_, quantise, quantise_asymmetric

Tensor = torch.Tensor
ROWS = 32
"""Of a block."""


class PackedWeight(NamedTuple):
    """W (N, K) in the order of ``packed_linear.h``: N·K·bits/8 bytes of codes, 4 (asymmetric: 8) a group besides."""

    q: Tensor
    """(N·K·bits/8,), int8; uint8 where there are minima."""
    scales: Tensor
    """(N·K/group_size,), fp32."""
    minima: Tensor | None
    """(N·K/group_size,), fp32; None for symmetric codes."""
    shape: tuple[int, int]
    """(N, K)."""
    bits: int
    """8 or 4."""
    group_size: int
    """Elements of a row that share a scale; a multiple of 16 that divides K."""

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and minima."""
        return sum(t.nbytes for t in (self.q, self.scales, self.minima) if t is not None)


@torch.no_grad()
def pack_weight(
    weight: Tensor, *, bits: int = 8, group_size: int | None = None, symmetric: bool = True
) -> PackedWeight:
    """Quantise W as :func:`zoo.kernels.quantise.quantise` (or ``quantise_asymmetric``) does, and pack it.

    Args:
        weight: (N, K), fp32, bf16 or fp16.
        bits: 8 or 4.
        group_size: a multiple of 16 that divides K; None: K, one scale a row. Rows are never padded.
        symmetric: without minima.

    Raises:
        ValueError: a dtype, shape or group size that cannot be.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must have 2 dims, (N, K).")
    rows, columns = weight.shape
    group = _group(columns, group_size)
    x = weight.contiguous()
    found: tuple[Tensor, ...] = (
        quantise(x, bits=bits, group_size=group) if symmetric else quantise_asymmetric(x, bits=bits, group_size=group)
    )
    q, scales, *minima = found
    return pack(q, scales, minima[0] if minima else None, shape=(rows, columns), bits=bits, group_size=group)


@torch.no_grad()
def pack(
    q: Tensor, scales: Tensor, minima: Tensor | None = None, *, shape: tuple[int, int], bits: int, group_size: int
) -> PackedWeight:
    """Codes, scales and minima in the row-by-row order of :mod:`zoo.kernels.quantise`, packed; values stay.

    Raises:
        ValueError: sizes or dtypes that do not belong together; a symmetric code of -128, which quantise never makes.
    """
    _check(q, scales, minima, shape, bits, group_size)
    if bits == 8 and minima is None and bool((q == -128).any()):
        raise ValueError("q has codes of -128; symmetric codes of 8 bits must lie within -127 and 127.")
    rows, columns = shape
    whole = rows // ROWS * ROWS
    head, rest = _cut(q.view(torch.uint8), whole * columns * bits // 8)
    if bits == 8:
        head = head.view(-1, 2, 4, 4, columns // 2, 2).permute(0, 4, 2, 1, 3, 5)
    else:
        head = torch.stack([head & 15, head >> 4], 1).view(-1, 2, 16, columns // 2, 2).permute(0, 3, 2, 4, 1)
        head = head[..., 0] | head[..., 1] << 4

    def placed(of_groups: Tensor) -> Tensor:
        first, last = _cut(of_groups, whole * (columns // group_size))
        return torch.cat([first.view(-1, ROWS, columns // group_size).transpose(1, 2).reshape(-1), last])

    packed = torch.cat([head.reshape(-1), rest]).view(q.dtype)
    least = None if minima is None else placed(minima)
    return PackedWeight(packed, placed(scales), least, (rows, columns), bits, group_size)


@torch.no_grad()
def unpack(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, scales and minima as :func:`pack` was given them."""
    q, scales, minima, (rows, columns), bits, group_size = weight
    _check(q, scales, minima, (rows, columns), bits, group_size)
    whole = rows // ROWS * ROWS
    head, rest = _cut(q.view(torch.uint8), whole * columns * bits // 8)
    if bits == 8:
        head = head.view(-1, columns // 2, 4, 2, 4, 2).permute(0, 3, 2, 4, 1, 5)
    else:
        head = torch.stack([head & 15, head >> 4], 1).view(-1, columns // 2, 16, 2, 2).permute(0, 4, 2, 1, 3)
        head = head[..., 0] | head[..., 1] << 4

    def placed(of_groups: Tensor) -> Tensor:
        first, last = _cut(of_groups, whole * (columns // group_size))
        return torch.cat([first.view(-1, columns // group_size, ROWS).transpose(1, 2).reshape(-1), last])

    codes = torch.cat([head.reshape(-1), rest]).view(q.dtype)
    return codes, placed(scales), None if minima is None else placed(minima)


@torch.no_grad()
def unpack_weight(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """W (N, K) as it is multiplied by: q·s, or q·s + lo, of ``dtype``."""
    q, scales, minima = unpack(weight)
    out = q.new_empty(weight.shape, dtype=dtype)
    if minima is None:
        dequantise_(out, q, scales, bits=weight.bits, group_size=weight.group_size)
    else:
        dequantise_asymmetric_(out, q, scales, minima, bits=weight.bits, group_size=weight.group_size)
    return out


def _cut(t: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return t[:at], t[at:]


def _group(columns: int, group_size: int | None) -> int:
    group = columns if group_size is None else group_size
    if group < 16 or group % 16 or columns % group:
        raise ValueError(
            f"group_size={group} for rows of {columns} elements; it must be a multiple of 16 that divides them: choose "
            f"another, or leave layers of such a width as they are."
        )
    return group


def _check(
    q: Tensor, scales: Tensor, minima: Tensor | None, shape: tuple[int, int], bits: int, group_size: int
) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}; it must be 8 or 4.")
    rows, columns = shape
    _group(columns, group_size)
    groups = rows * (columns // group_size)
    expected = [("q", q, torch.int8 if minima is None else torch.uint8, rows * columns * bits // 8)]
    expected += [
        (name, t, torch.float32, groups) for name, t in (("scales", scales), ("minima", minima)) if t is not None
    ]
    for name, t, dtype, numel in expected:
        if t.dtype is not dtype or tuple(t.shape) != (numel,) or not t.is_contiguous():
            raise ValueError(
                f"{name} is {t.dtype} of shape {tuple(t.shape)} with strides {t.stride()}; for W of shape {shape}, "
                f"{bits} bits and groups of {group_size} it must be {dtype} of shape ({numel},), contiguous."
            )
