"""1-bit compression in plain torch, in the order of operations of ``onebit.h``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LANES = 16


def compress_(
    c: torch.Tensor, x: torch.Tensor | None, error: torch.Tensor | None, sent_bits: torch.Tensor | None,
    sent_scales: torch.Tensor | None, group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`zoo.kernels.onebit.compress_`; ``x`` is None where it is ``c``."""
    e = None if error is None else error.view(-1)
    if e is not None and sent_bits is not None and sent_scales is not None:
        e = e - _signed(_positive(sent_bits, c.numel()), sent_scales, group_size)
    flat = c.view(-1)
    given = flat if x is None else x.view(-1).float()
    if e is not None:
        flat.copy_(given + e)
    elif x is not None:
        flat.copy_(given)
    return _signs(flat.float(), group_size)


def compress_mean_(
    c: torch.Tensor, wires: torch.Tensor, error: torch.Tensor | None, sent_bits: torch.Tensor | None,
    sent_scales: torch.Tensor | None, group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See :func:`zoo.kernels.onebit.compress_mean_`."""
    n = c.numel()
    head, end = -(-n // group_size) * 4, -(-n // group_size) * 4 - (-n // 8)
    x = torch.empty(n, dtype=torch.float32, device=c.device)
    for rank, wire in enumerate(wires if n else ()):
        decompress_(x, wire[head:end], wire[:head].view(torch.float32), group_size, rank > 0)
    return compress_(c, x.mul_(1.0 / len(wires)), error, sent_bits, sent_scales, group_size)


def _signs(c: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = c.numel()
    groups = -(-n // group_size)
    padded = F.pad(c, (0, groups * group_size - n)).view(groups, group_size)
    lanes = padded.new_zeros(groups, LANES)
    for part in torch.split(padded.abs(), LANES, dim=1):
        lanes = lanes + part
    total = lanes[:, 0]
    for k in range(1, LANES):
        total = total + lanes[:, k]
    counts = torch.full((groups,), float(group_size), device=c.device)
    if n % group_size:
        counts[-1] = n % group_size
    scales = total / counts
    positive = c >= 0
    places = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=c.device)
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
