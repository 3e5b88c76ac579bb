"""The documented semantics with dense (T, E, C) tensors and loops, in float64: an independent reference.

Legend: T tokens, D hidden size, E experts, C capacity, k choices.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


def fp32(value: float) -> float:
    """Rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def room(tokens: int, experts: int, factor: float, minimum: int) -> int:
    """C."""
    return min(max(math.ceil(fp32(fp32(tokens / experts) * fp32(factor))), minimum), tokens) if tokens else 0


@dataclass
class Dense:
    """What a layer gives."""

    output: Tensor
    loss: Tensor
    counts: list[int]
    kept: list[int]


def mixture(
    x: Tensor, weight: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], *, k: int, capacity: int | None,
    used: Sequence[bool] | None = None, lots: Tensor | None = None,
) -> Dense:  # fmt: skip
    """y = Σ_e Σ_c combine[t, e, c] f_e(Σ_t' dispatch[t', e, c] x_t').

    Args:
        lots: (T,), k = 1: a full expert keeps the greatest.
    """
    tokens, num = x.shape[0], weight.shape[0]
    mask = [True] * tokens if used is None else list(used)
    gates = torch.softmax(x @ weight.t(), 1)
    ranked = [sorted(range(num), key=lambda e, t=t: (-float(gates[t, e]), e))[:k] for t in range(tokens)]  # type: ignore[misc]
    wanted = [[t for t in range(tokens) if mask[t] and e in ranked[t]] for e in range(num)]
    limit = tokens if capacity is None else capacity
    kept: list[list[int]] = []
    for e in range(num):
        if k == 1:
            key = [(0.0 if lots is None else -float(lots[t]), t) for t in wanted[e]]
        elif k == 2:
            key = [(float(ranked[t].index(e)), t) for t in wanted[e]]
        else:
            key = [(-float(gates[t, e]), t) for t in wanted[e]]
        kept.append([t for _, t in sorted(key)[:limit]])
    most = max([len(ts) for ts in kept], default=0)
    dispatch = torch.zeros(tokens, num, most, dtype=x.dtype)
    combine = torch.zeros_like(dispatch)
    for t in range(tokens):
        mine = [e for e in range(num) if t in kept[e]]
        total = sum(gates[t, e] for e in mine) if k > 1 else 1.0
        for e in mine:
            combine = combine.index_put(
                (torch.tensor(t), torch.tensor(e), torch.tensor(kept[e].index(t))), gates[t, e] / total
            )
            dispatch[t, e, kept[e].index(t)] = 1
    inputs = torch.einsum("tec,td->ecd", dispatch, x)
    outputs = torch.stack([experts[e](inputs[e]) for e in range(num)])
    output = torch.einsum("tec,ecd->td", combine, outputs)
    many = max(sum(mask), 1)
    mean = torch.stack([gates[t] for t in range(tokens) if mask[t]]).mean(0) if any(mask) else torch.zeros(num)
    first = [[t for t in wanted[e] if k > 2 or ranked[t][0] == e] for e in range(num)]
    share = torch.tensor([len(ts) / many for ts in first], dtype=x.dtype)
    loss = (mean * share).sum() * num / (k if k > 2 else 1)
    return Dense(output, loss, [len(ts) for ts in wanted], [len(ts) for ts in kept])
