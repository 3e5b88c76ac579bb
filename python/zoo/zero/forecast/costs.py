"""What a ZeRO step will cost, from the plan alone: bytes a rank holds, and bytes it sends.

The traffic is the sum of the hops (``collectives/routes.py``) of every bucket's reductions and of the gathers that
the plan of one forward and its backward (``runtime/planning.py``) asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from zoo.shard.buckets import Bucket
from zoo.shard.collectives.routes import Hop
from zoo.shard.offload.tiers import Tier
from zoo.shard.runtime.planning import Plan

if TYPE_CHECKING:
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.updater import Updater


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Bytes on one rank. Memory is the model states after a step; traffic is one backward and one step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    secondary_bytes: int = 0
    """hpZ: what forward leaves on this rank for backward, beside parameters; gone after the step."""
    wire_bytes: Mapping[str, int]
    """Bytes this rank sends, by operation (the convention of :class:`zoo.comm.OpStats`). Gradients that may travel as
    rows (``sparse_gradients``) count as if they travelled whole, which is the most that it can be."""
    intra_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for ranks of the same node, where it is known which these are."""
    inter_bytes: Mapping[str, int] = field(default_factory=dict)
    """Those of them for other nodes."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Model states by tier: device, host, nvme. Where the device is the CPU, device and host are the same memory."""
    buffers_bytes: int = 0
    """The most host memory that buffers between memory and NVMe take."""
    pinned_bytes: int = 0
    """Of the host memory, what is page-locked with pin_memory."""
    nvme_files_bytes: int = 0
    """The size of the files, whole pages."""
    nvme_read_bytes: int = 0
    nvme_written_bytes: int = 0
    """Traffic of one backward and one step with the forward before them."""

    def to_dict(self) -> dict[str, Any]:
        """Everything, and the total."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def table(self) -> str:
        """One line a figure."""
        rows = [
            ("parameters in memory", self.parameters_bytes), ("gradients in memory", self.gradients_bytes),
            ("optimizer states in memory", self.optimizer_bytes),
            *((f"model states, tier {tier}", size) for tier, size in self.tiers.items()),
            ("buffers of offloading", self.buffers_bytes), ("page-locked", self.pinned_bytes),
            ("files on NVMe", self.nvme_files_bytes), ("read from NVMe a step", self.nvme_read_bytes),
            ("written to NVMe a step", self.nvme_written_bytes),
            *((f"sent a step, {op}", size) for op, size in self.wire_bytes.items()),
            *((f"to other nodes, {op}", size) for op, size in self.inter_bytes.items()),
        ]  # fmt: skip
        return "\n".join(f"{name:<32}{size:>20,} bytes" for name, size in rows)

    @property
    def total_bytes(self) -> int:
        """Model states: parameters, gradients and optimizer states."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def forecast(
    buckets: Sequence[Bucket],
    *,
    plan: Plan,
    reduce_dtype: torch.dtype | None,
    optimizer_bytes: Mapping[Tier, int],
    clips: bool,
    others: Iterable[Hop] = (),
) -> Forecast:
    """Forecast a step of the given buckets.

    Args:
        plan: of a forward and its backward, or of a window.
        reduce_dtype: in which gradients are sent, None for their own.
        optimizer_bytes: bytes of masters and optimizer states on this rank, by tier.
        clips: whether the gradient norm is exchanged.
        others: what a step sends beside these buckets and that.
    """
    parameters = gradients = 0
    hops: list[Hop] = list(others)
    for bucket in buckets:
        parameters += bucket.kept_bytes()
        if bucket.spec.trainable:
            gradients += 0 if bucket.gradients_on_nvme else bucket.gradient_bytes()
            waits = bucket.routes.axes.spans_layers  # for the step
            hops += bucket.reduce_hops(reduce_dtype, times=1 if waits else plan.reductions)
    for bucket, again in plan.gathers:
        hops += bucket.gather_hops(again=again)
    secondary = sum(bucket.secondary_bytes() for bucket in plan.secondary)
    trainable = [b for b in buckets if b.spec.trainable]
    for axes in dict.fromkeys(b.routes.axes for b in trainable) if clips else ():
        of_family = [b for b in trainable if b.routes.axes is axes]
        if of_family[0].placements.states.is_split:
            hops.append(Hop("all_gather", axes.shard, 8 * len(of_family) * axes.shard.size))
        apart = of_family[0].routes.apart()
        if apart is not None:
            hops.append(Hop("all_gather", apart, 8 * apart.size))
        if axes.parts is not None:
            hops.append(Hop("all_gather", axes.parts, 8 * axes.parts.size))
    wire, intra, inter = _added(hops)
    return Forecast(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=sum(optimizer_bytes.values()) - optimizer_bytes[Tier.NVME],
        secondary_bytes=secondary,
        wire_bytes=wire,
        intra_bytes=intra,
        inter_bytes=inter,
    )


def _added(hops: Iterable[Hop]) -> list[dict[str, int]]:
    totals: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for hop in hops:
        for total, sent in zip(totals, hop.sent(), strict=True):
            total[hop.op] += sent
    return [{op: sent for op, sent in total.items() if sent} for total in totals]


def gathered_from_shards(plan: Plan, weigh: Callable[[Bucket], int]) -> int:
    """Σ of a weight over the gathers of one forward and its backward that begin with the ranks' shards."""
    return sum(weigh(bucket) for bucket, again in plan.gathers if not again)


Gathered = Callable[[Callable[[Bucket], int]], int]
"""Σ of a weight over the gathers of a step."""


def tier_bytes(buckets: Iterable[Bucket], states: dict[Tier, int]) -> dict[str, int]:
    """Model states of one rank between steps, by tier; gradients are those that the update takes."""
    found = dict(states)
    for bucket in buckets:
        found[bucket.placements.parameters.tier] += bucket.shard_bytes() + bucket.original_bytes()
        found[bucket.placements.gradients.tier] += bucket.gradient_bytes()
    return {tier.value: num_bytes for tier, num_bytes in found.items()}


def nvme_traffic(buckets: Sequence[Bucket], updater: Updater, gathered: Gathered) -> tuple[int, int]:
    """Bytes that one rank reads from and writes to NVMe in one backward and one step, once states exist."""
    read, written = updater.nvme_traffic()
    for bucket in buckets:
        if bucket.gradients_on_nvme:
            written += bucket.num_gradient_bytes // bucket.num_chunks
    return read + gathered(lambda b: b.shard_bytes() if b.parameters_on_nvme else 0), written


def forecast_step(
    sharded: ShardedModel, updater: Updater, plan: Plan, *, clips: bool, num_alike: int
) -> Forecast:  # fmt: skip
    """See :meth:`zoo.zero.ZeroOptimizer.forecast`.

    Args:
        clips: the step measures the norm. num_alike: numbers that ranks compare where they exchange it.
    """
    states = updater.expected.num_bytes(updater.segments)
    found = forecast(
        sharded.buckets,
        plan=plan,
        reduce_dtype=sharded.precision.reduce,
        optimizer_bytes=states,
        clips=clips,
        others=_hops_of_step(sharded, clips=clips, num_alike=num_alike) + updater.hops(),
    )
    tiers, buffers = tier_bytes(sharded.buckets, states), updater.buffer_bytes()
    read, written = nvme_traffic(sharded.buckets, updater, lambda weigh: gathered_from_shards(plan, weigh))
    pins = sharded.config.offload_param.pin_memory or sharded.config.offload_optimizer.pin_memory
    return replace(
        found, tiers=tiers, buffers_bytes=buffers, pinned_bytes=(buffers + tiers["host"]) * pins,
        nvme_files_bytes=sharded.scratch.nvme_bytes() if sharded.scratch is not None else 0,
        nvme_read_bytes=read, nvme_written_bytes=written,
    )  # fmt: skip


def _hops_of_step(sharded: ShardedModel, *, clips: bool, num_alike: int) -> list[Hop]:
    """What a step sends beside gradients and parameters: buffers of the model, numbers between its layers, and the
    options of the groups, which go with the norm where the same ranks exchange it."""
    comm = sharded.comm
    found = sharded.module_buffers.hops() if sharded.module_buffers is not None else []
    if sharded.layers is not None:
        found += [Hop("all_reduce", sharded.layers, 4)] * (2 if sharded.tied_anywhere else 1)
        return found + [Hop("all_gather", sharded.layers, 8 * sharded.layers.size)] * clips
    axes = {b.routes.axes for b in sharded.trainable if b.placements.states.is_split and b.shard_group.size > 1}
    if clips and any(tuple(a.shard.ranks) == tuple(comm.ranks) for a in axes):
        found.append(Hop("all_gather", comm, 8 * num_alike * comm.size))
    return found
