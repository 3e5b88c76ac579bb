"""Quantisation in plain torch, in the order of operations of ``quantise.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def quantise(x: Tensor, bits: int, group_size: int, nodes: int, local: int) -> tuple[Tensor, Tensor]:
    """See :func:`zoo.kernels.quantise.quantise`."""
    q, scales, _ = _quantised(x, bits, group_size, nodes, local, symmetric=True)
    return q, scales


def quantise_asymmetric(x: Tensor, bits: int, group_size: int, nodes: int, local: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`zoo.kernels.quantise.quantise_asymmetric`."""
    return _quantised(x, bits, group_size, nodes, local, symmetric=False)


def dequantise_(out: Tensor, q: Tensor, scales: Tensor, bits: int, group_size: int, ranks: int, factor: float) -> None:
    """See :func:`zoo.kernels.quantise.dequantise_`."""
    _dequantise(out, q, scales, None, bits, group_size, ranks, factor)


def dequantise_asymmetric_(
    out: Tensor, q: Tensor, scales: Tensor, minima: Tensor, bits: int, group_size: int, ranks: int, factor: float
) -> None:
    """See :func:`zoo.kernels.quantise.dequantise_asymmetric_`."""
    _dequantise(out, q, scales, minima, bits, group_size, ranks, factor)


def _quantised(
    x: Tensor, bits: int, group_size: int, nodes: int, local: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    n, limit, dtype = x.numel(), float(2 ** (bits - symmetric) - 1), torch.int8 if symmetric else torch.uint8
    groups = -(-n // group_size)
    if n == 0:
        return x.new_empty(0, dtype=dtype), *x.new_empty(2, 0, dtype=torch.float32)
    flat = x.reshape(-1).float()
    wide = torch.cat([flat, flat[-1:].expand(groups * group_size - n)]).view(groups, group_size)
    if symmetric:
        span = wide.abs().amax(1)
        zero = torch.zeros_like(span)
    else:
        ordered = _ordered(wide.view(torch.int32))
        zero, high = (_ordered(end).view(torch.float32) for end in (ordered.amin(1), ordered.amax(1)))
        span = high - zero
    scaled = (wide - zero[:, None]) * (torch.full_like(span, limit) / span)[:, None]
    q = torch.where(scaled.isnan(), 0.0, scaled).clamp(-limit if symmetric else 0.0, limit).round().to(dtype)
    scales = span / torch.full_like(span, limit)  # by a number, torch would multiply by its inverse on a GPU
    if nodes * local > 1:
        q = q.view(nodes, local, -1).transpose(0, 1).reshape(groups, group_size)
        scales, zero = (t.view(nodes, local, -1).transpose(0, 1).reshape(-1) for t in (scales, zero))
    q = q.view(-1)[:n]
    if bits == 4:
        pairs = F.pad(q, (0, n % 2)).view(-1, 2).to(torch.int32) & 15
        q = (pairs[:, 0] | (pairs[:, 1] << 4)).to(torch.uint8).view(dtype)
    return q, scales, zero


def _dequantise(
    out: Tensor, q: Tensor, scales: Tensor, minima: Tensor | None, bits: int, group_size: int, ranks: int,
    factor: float,
) -> None:  # fmt: skip
    n = out.numel()
    if n == 0:
        return
    rows = q.view(ranks, -1).to(torch.int32)
    if bits == 4:
        low = rows & 15 if minima is not None else ((rows & 15) ^ 8) - 8
        rows = torch.stack([low, rows >> 4], dim=2).view(ranks, -1)[:, :n]
    y = rows.float() * _each(scales, ranks, group_size, n)
    if minima is not None:
        y = y + _each(minima, ranks, group_size, n)
    total = y[0]
    for r in range(1, ranks):
        total = total + y[r]
    out.view(-1).copy_(total * factor if factor != 1.0 else total)


def _each(of_groups: Tensor, ranks: int, group_size: int, n: int) -> Tensor:
    """(ranks, n): that of the group of each element."""
    return of_groups.view(ranks, -1).repeat_interleave(group_size, dim=1)[:, :n]


def _ordered(bits: Tensor) -> Tensor:
    """The bits of fp32 as integers that are ordered as the numbers are, -0 below +0, NaNs at the ends; and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
