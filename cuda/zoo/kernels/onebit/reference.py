"""1-bit compression in plain torch, in the order of operations of ``onebit.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LANES = 16


def compress_(x: torch.Tensor, error: torch.Tensor | None, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`zoo.kernels.onebit.compress_`."""
    n = x.numel()
    if error is not None:
        x.view(-1).add_(error.view(-1))
    c = x.reshape(-1).float()
    groups = -(-n // group_size)
    padded = F.pad(c, (0, groups * group_size - n)).view(groups, group_size)
    lanes = padded.new_zeros(groups, LANES)
    for part in torch.split(padded.abs(), LANES, dim=1):
        lanes = lanes + part
    total = lanes[:, 0]
    for k in range(1, LANES):
        total = total + lanes[:, k]
    counts = torch.full((groups,), float(group_size), device=x.device)
    if n % group_size:
        counts[-1] = n % group_size
    scales = total / counts
    positive = c >= 0
    places = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=x.device)
    bits = (F.pad(positive.to(torch.uint8), (0, -n % 8)).view(-1, 8) * places).sum(1, dtype=torch.uint8)
    return bits, scales


def owed_(error: torch.Tensor, c: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, group_size: int) -> None:
    """See :func:`zoo.kernels.onebit.owed_`."""
    y = _signed(_positive(bits, c.numel()), scales, group_size)
    error.view(-1).copy_(c.view(-1) - y)


def decompress_(out: torch.Tensor, bits: torch.Tensor, scales: torch.Tensor, group_size: int, add: bool) -> None:
    """See :func:`zoo.kernels.onebit.decompress_`."""
    y = _signed(_positive(bits, out.numel()), scales, group_size)
    flat = out.view(-1)
    flat.copy_(flat.float() + y if add else y)


def _signed(positive: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    each = scales.repeat_interleave(group_size)[: positive.numel()]
    return torch.where(positive, each, -each)


def _positive(bits: torch.Tensor, n: int) -> torch.Tensor:
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> places) & 1).view(-1)[:n].bool()
