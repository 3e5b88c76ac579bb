"""The state of a ZeRO optimizer as its ranks save it, put together."""

from __future__ import annotations

from typing import Any

import torch

from zoo.zero import ZeroOptimizer


def collect(optimizer: ZeroOptimizer) -> Any:
    return [(s.name, s.role, s.start, s.shape, s.tensor.clone()) for s in optimizer.state_slices()]


def whole(runs: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    found: dict[tuple[str, str], torch.Tensor] = {}
    for name, role, start, shape, values in (piece for run in runs for piece in run):
        flat = found.setdefault((name, role), torch.full(shape, torch.nan)).view(-1)
        assert bool(flat[start : start + values.numel()].isnan().all())
        flat[start : start + values.numel()] = values
    return found
