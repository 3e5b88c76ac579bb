"""From the options to files and buffers, before the buckets are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zoo import io
from zoo.comm import Communicator
from zoo.zero.collectives.routes import Routes
from zoo.zero.offload.tiers import Tier
from zoo.zero.placement.packing import BucketSpec, layout_of
from zoo.zero.placement.placements import Placements
from zoo.zero.sharding.buckets import Stores

if TYPE_CHECKING:
    from zoo.zero.config import ZeroConfig
    from zoo.zero.offload.scratch import Scratch


def open_stores(
    plan: Sequence[BucketSpec], placements: Sequence[Placements], routes: Sequence[Routes], config: ZeroConfig, *,
    comm: Communicator, aio: io.AioConfig | io.Handle | None, keep_norms: bool,
) -> tuple[Scratch | None, list[Stores]]:  # fmt: skip
    """What the tiers of each bucket need; the files have their full size afterwards.

    Collective over ``comm``, all ranks of the optimizer, if there is a cap of host memory; a DryRun opens nothing.
    """
    parameters, optimizer = config.offload_param, config.offload_optimizer
    if parameters.device == "none" and optimizer.device == "none":
        return None, [Stores() for _ in plan]
    counts = [route.axes.shard.size for route in routes]
    numels = [layout_of(spec, count).size // count for spec, count in zip(plan, counts, strict=True)]
    scratch: Any = _open(comm, plan, config, aio)
    sizes = [n * spec.gradient_dtype.itemsize for n, spec in zip(numels, plan, strict=True)]
    packed = [r.shard_bytes(n, s.dtype.itemsize) for r, n, s in zip(routes, numels, plan, strict=True)]

    def on_nvme(tier: Sequence[Tier], sizes: Sequence[int]) -> list[int]:
        return [size if where is Tier.NVME else 0 for size, where in zip(sizes, tier, strict=True)]

    kept, shelf, park = on_nvme([p.parameters.tier for p in placements], packed), None, None
    if any(kept):
        shelf = scratch.shelf(parameters.nvme_path, "parameters", kept)
    parked = on_nvme([p.gradients.tier if p.keep_gradients else Tier.DEVICE for p in placements], sizes)
    if any(parked):
        from zoo.zero.offload.gradient_files import GradientPark

        park = GradientPark(scratch, scratch.shelf(optimizer.nvme_path, "gradients", parked))
    values = {
        trainable: _shelf_of_originals(scratch, config, plan, placements, numels, trainable=trainable)
        for trainable in (False, True)
    }
    return scratch, [
        Stores(scratch=scratch, shelf=shelf, park=park, originals=values[spec.trainable], keep_norms=keep_norms)
        for spec in plan
    ]


def _shelf_of_originals(
    scratch: Any, config: ZeroConfig, plan: Sequence[BucketSpec], placements: Sequence[Placements],
    numels: Sequence[int], *, trainable: bool,
) -> Any:  # fmt: skip
    """For the values that parameters came with; those of trainable ones stay only until there are masters."""
    sizes = []
    for n, spec, placed in zip(numels, plan, placements, strict=True):
        tier = placed.states.tier if trainable else placed.parameters.tier
        here = spec.trainable is trainable and spec.keeps_originals and tier is Tier.NVME
        sizes.append(n * spec.original.itemsize if here else 0)
    if not any(sizes):
        return None
    folder = config.offload_optimizer.nvme_path if trainable else config.offload_param.nvme_path
    return scratch.shelf(folder, "original values", sizes)


def _open(
    comm: Communicator, plan: Sequence[BucketSpec], config: ZeroConfig, aio: io.AioConfig | io.Handle | None
) -> Any:
    if comm.is_dry:
        from zoo.zero.forecast.dry_run import DryScratch

        return DryScratch()
    # What bounces are ragged ends: under a cap two buffers a thread do, and what they take is left out of the account.
    from zoo.zero.offload.budget import HostBudget
    from zoo.zero.offload.scratch import Scratch, handle_of

    options = {} if config.offload_host_bytes is None else {"bounce_bytes": 0}
    (handle, owned), budget = handle_of(aio, **options), None
    if config.offload_host_bytes is not None:
        on_nvme = "nvme" in (config.offload_param.device, config.offload_optimizer.device)
        bounce = handle.most_bounce_bytes if on_nvme else 0
        try:
            budget = HostBudget(comm, config, plan[0].parameters[0].device, bounce_bytes=bounce)
        except BaseException:
            if owned:
                handle.close()
            raise
    pinned = config.offload_param.pin_memory or config.offload_optimizer.pin_memory
    return Scratch(handle, owned=owned, budget=budget, pinned=pinned)
