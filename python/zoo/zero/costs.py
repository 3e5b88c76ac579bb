"""What a ZeRO step will cost, from the plan alone: bytes a rank holds, and bytes it sends.

The traffic is the sum of the hops (``collectives/routes.py``) of every bucket's reductions and of the gathers that
the plan of one forward and its backward (``runtime/planning.py``) asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo.cost.collectives import Hop, traffic_of
from zoo.cost.forecast import Forecast
from zoo.shard.offload.tiers import Tier
from zoo.shard.runtime.planning import Plan

if TYPE_CHECKING:
    from zoo.shard.sharded import ShardedModel
    from zoo.zero.update.updater import Updater


def forecast_step(
    sharded: ShardedModel, updater: Updater, plan: Plan, *, clips: bool, num_alike: int
) -> Forecast:  # fmt: skip
    """See :meth:`zoo.zero.ZeroOptimizer.forecast`.

    Args:
        plan: of a forward and its backward, or of a window.
        clips: the step measures the norm. num_alike: numbers that ranks compare where they exchange it.
    """
    buckets, states = sharded.buckets, updater.expected.num_bytes(updater.segments)
    tiers = dict(states)
    read, written = updater.nvme_traffic()
    for bucket in buckets:
        tiers[bucket.placements.parameters.tier] += bucket.shard_bytes() + bucket.original_bytes()
        tiers[bucket.placements.gradients.tier] += bucket.gradient_bytes()
        if bucket.gradients_on_nvme:
            share = bucket.num_gradient_bytes // bucket.num_chunks  # what is there is read, and added to
            written, read = written + share * plan.reductions, read + share * (plan.reductions - 1)
    read += sum(b.shard_bytes() for b, again in plan.gathers if b.parameters_on_nvme and not again)
    to_host, to_device, host_updated = _copies(sharded, plan)
    buffers, scratch = updater.buffer_bytes(), sharded.scratch
    pins = sharded.config.offload_param.pin_memory or sharded.config.offload_optimizer.pin_memory
    hops = _hops_of_step(sharded, clips=clips, num_alike=num_alike) + updater.hops()
    sent = traffic_of(hops + _hops_of_buckets(sharded, plan, clips=clips))
    return Forecast(
        parameters_bytes=sum(b.kept_bytes() for b in buckets),
        gradients_bytes=sum(0 if b.gradients_on_nvme else b.gradient_bytes() for b in buckets),
        optimizer_bytes=sum(states.values()) - states[Tier.NVME],
        secondary_bytes=sum(b.secondary_bytes() for b in plan.secondary),
        wire_bytes=sent.wire,
        intra_bytes=sent.intra,
        inter_bytes=sent.inter,
        tiers={tier.value: num_bytes for tier, num_bytes in tiers.items()},
        buffers_bytes=buffers,
        pinned_bytes=(buffers + tiers[Tier.HOST]) * pins,
        nvme_files_bytes=scratch.nvme_bytes() if scratch is not None else 0,
        nvme_read_bytes=read,
        nvme_written_bytes=written,
        to_host_bytes=to_host,
        to_device_bytes=to_device,
        host_updated=host_updated,
        gathered_bytes=max(plan.actions.whole_bytes(), default=0),
    )


def _copies(sharded: ShardedModel, plan: Plan) -> tuple[int, int, int]:
    """(bytes to the host, bytes to the device, parameters that are updated on the host) of a step.

    Gradients go where their update is: with every reduction where that is split over ranks, and what is there already
    comes back to be added to. Updated parameters come back, unless they are kept there too. Those that are come with
    every gather that reads them.
    """
    to_host = to_device = updated = 0
    for bucket in (b for b in sharded.trainable if b.updates_off_device):
        chunks = len(bucket.updated_chunks)
        share = bucket.num_gradient_bytes // bucket.num_chunks * chunks
        times = plan.reductions if bucket.placements.gradients.is_split else 1
        to_host += share * times
        to_device += share * (times - 1)
        updated += bucket.layout.size // bucket.num_chunks * chunks
        if bucket.placements.parameters.tier is Tier.DEVICE:
            to_device += bucket.num_bytes // bucket.num_chunks * chunks
    for bucket, again in plan.gathers:
        if bucket.placements.parameters.tier is not Tier.DEVICE and not bucket.on_cpu and not again:
            to_device += bucket.shard_bytes()
    return to_host, to_device, updated


def _hops_of_buckets(sharded: ShardedModel, plan: Plan, *, clips: bool) -> list[Hop]:
    """What gradients, parameters and the norm of the gradients send."""
    hops = list[Hop]()
    for bucket in sharded.trainable:
        waits = bucket.routes.axes.spans_layers  # for the step
        hops += bucket.reduce_hops(sharded.precision.reduce, times=1 if waits else plan.reductions)
    for bucket, again in plan.gathers:
        hops += bucket.gather_hops(again=again)
    for axes in dict.fromkeys(b.routes.axes for b in sharded.trainable) if clips else ():
        of_family = [b for b in sharded.trainable if b.routes.axes is axes]
        if of_family[0].placements.states.is_split:
            hops.append(Hop("all_gather", axes.shard, 8 * len(of_family) * axes.shard.size))
        apart = of_family[0].routes.apart()
        if apart is not None:
            hops.append(Hop("all_gather", apart, 8 * apart.size))
        if axes.parts is not None:
            hops.append(Hop("all_gather", axes.parts, 8 * axes.parts.size))
    return hops


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
