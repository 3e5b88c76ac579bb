"""Quantisation in plain torch, in the order of operations of ``quantise.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def quantise(x: torch.Tensor, bits: int, group_size: int, nodes: int, local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`zoo.kernels.quantise.quantise`."""
    n, limit = x.numel(), 127.0 if bits == 8 else 7.0
    groups = -(-n // group_size)
    wide = F.pad(x.reshape(-1).float(), (0, groups * group_size - n)).view(groups, group_size)
    if n == 0:
        return x.new_empty(0, dtype=torch.int8), x.new_empty(0, dtype=torch.float32)
    most = wide.abs().amax(1)
    scaled = wide * (torch.full_like(most, limit) / most)[:, None]
    q = torch.where(scaled.isnan(), 0.0, scaled).clamp(-limit, limit).round().to(torch.int8)
    scales = most / torch.full_like(most, limit)  # by a number, torch would multiply by its inverse on a GPU
    if nodes * local > 1:
        q = q.view(nodes, local, -1).transpose(0, 1).reshape(groups, group_size)
        scales = scales.view(nodes, local, -1).transpose(0, 1).reshape(-1)
    q = q.view(-1)[:n]
    if bits == 4:
        pairs = F.pad(q, (0, n % 2)).view(-1, 2).to(torch.int32) & 15
        q = (pairs[:, 0] | (pairs[:, 1] << 4)).to(torch.uint8).view(torch.int8)
    return q, scales


def dequantise_(
    out: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, bits: int, group_size: int, ranks: int, factor: float
) -> None:
    """See :func:`zoo.kernels.quantise.dequantise_`."""
    n = out.numel()
    if n == 0:
        return
    rows = q.view(ranks, -1).to(torch.int32)
    if bits == 4:
        rows = torch.stack([((rows & 15) ^ 8) - 8, rows >> 4], dim=2).view(ranks, -1)[:, :n]
    each = scales.view(ranks, -1).repeat_interleave(group_size, dim=1)[:, :n]
    total = rows[0].float() * each[0]
    for r in range(1, ranks):
        total = total + rows[r].float() * each[r]
    out.view(-1).copy_(total * factor if factor != 1.0 else total)
