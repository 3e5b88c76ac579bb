"""How experts were used: counted on the device, read once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Tensor = torch.Tensor


def count(tally: Tensor, demand: Tensor, counts: Tensor) -> None:
    """Add what a forward has come to, unless activation checkpointing computes it again."""
    torch.ops.zoo_moe.count(tally, demand, counts)


@torch.library.custom_op("zoo_moe::count", mutates_args=("tally",))
def _count(tally: Tensor, demand: Tensor, counts: Tensor) -> None:
    if torch._C._current_graph_task_id() == -1:  # no backward is under way
        tally[0] += demand
        tally[1] += counts


@_count.register_fake
def _(tally: Tensor, demand: Tensor, counts: Tensor) -> None:
    return None


def read(tallies: Sequence[Tensor]) -> list[Tensor]:
    """The same in host memory, waiting for a device once."""
    if not tallies:
        return []
    flat = torch.cat([tally.to(tallies[0].device).reshape(-1) for tally in tallies]).cpu()
    return [part.view(2, -1) for part in torch.split(flat, [tally.numel() for tally in tallies])]


def summary(tally: Tensor) -> Mapping[str, float]:
    """Of a (2, E) tally: ``load`` max_e d_e / mean_e d_e of the demand d (1: even), ``entropy`` -Σ f_e log f_e / log E
    with f = d / Σ d (1: even), and ``dropped``, the share of assignments that no expert took."""
    demand, kept = tally.to("cpu", torch.float64)
    total = float(demand.sum())
    if not total:
        return {"load": 0.0, "entropy": 0.0, "dropped": 0.0}
    share = demand / total
    entropy = float(-(share * share.clamp(min=1e-300).log()).sum())
    even = float(torch.tensor(float(demand.numel())).log()) if demand.numel() > 1 else 1.0
    return {
        "load": float(demand.max()) * demand.numel() / total,
        "entropy": entropy / even if demand.numel() > 1 else 1.0,
        "dropped": 1.0 - float(kept.sum()) / total,
    }
