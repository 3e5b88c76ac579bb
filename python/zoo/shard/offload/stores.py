"""From the options to files, before the buckets are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import io
from zoo.comm import Communicator
from zoo.shard.collectives.routes import Routes
from zoo.shard.offload.tiers import Tier
from zoo.shard.placement.packing import BucketSpec, layout_of
from zoo.shard.placement.placements import Placements
from zoo.shard.roles import GRADIENT, ORIGINAL, PARAMETER, Store

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig
    from zoo.shard.offload.scratch import Scratch


def open_stores(
    plan: Sequence[BucketSpec], placements: Sequence[Placements], routes: Sequence[Routes], config: ZeroConfig, *,
    comm: Communicator, aio: io.AioConfig | io.Handle | None,
) -> tuple[Scratch | None, list[dict[str, Store]]]:  # fmt: skip
    """Of each bucket the files of its roles, by role; they have their full size afterwards.

    Collective over ``comm``, all ranks of the optimizer, if there is a cap of host memory; a DryRun opens nothing.
    """
    parameters, optimizer = config.offload_param, config.offload_optimizer
    found: list[dict[str, Store]] = [{} for _ in plan]
    if parameters.device == "none" and optimizer.device == "none":
        return None, found
    from zoo.shard.offload.scratch import WriteBehind

    scratch: Any = _open(comm, plan, config, aio)
    numels = [layout_of(s, r.axes.shard.size).size // r.axes.shard.size for s, r in zip(plan, routes, strict=True)]
    members = list(zip(numels, plan, placements, routes, found, strict=True))

    def add(
        role: str, folder: Path | None, name: str, which: Callable[[BucketSpec, Placements], Tier | None],
        size: Callable[[int, BucketSpec, Routes], int], of: Callable[[Any], Store] = lambda nvme_file: nvme_file,
    ) -> None:  # fmt: skip
        sizes = [size(n, s, r) if which(s, p) is Tier.NVME else 0 for n, s, p, r, _ in members]
        if any(sizes):
            store = of(scratch.nvme_file(folder, name, sizes))
            for _, s, p, _, stores in members:
                if which(s, p) is Tier.NVME:
                    stores[role] = store

    add(PARAMETER, parameters.nvme_path, "parameters", lambda s, p: p.parameters.tier,
        lambda n, s, r: r.shard_bytes(n, s.dtype.itemsize))  # fmt: skip
    add(GRADIENT, optimizer.nvme_path, "gradients", lambda s, p: p.gradients.tier if p.keep_gradients else None,
        lambda n, s, r: n * s.gradient_dtype.itemsize, WriteBehind)  # fmt: skip

    def original(trainable: bool) -> Callable[[BucketSpec, Placements], Tier | None]:
        """Those of trainable buckets stay only until there are masters."""

        def tier(spec: BucketSpec, placed: Placements) -> Tier | None:
            if spec.trainable is not trainable or not spec.keeps_originals:
                return None
            return placed.states.tier if trainable else placed.parameters.tier

        return tier

    for trainable, folder in ((False, parameters.nvme_path), (True, optimizer.nvme_path)):
        add(ORIGINAL, folder, "original values", original(trainable), lambda n, s, r: n * s.original.itemsize)
    return scratch, found


def _open(
    comm: Communicator, plan: Sequence[BucketSpec], config: ZeroConfig, aio: io.AioConfig | io.Handle | None
) -> Any:
    if comm.is_dry:
        from zoo.shard.dry_run import DryScratch

        return DryScratch()
    # What bounces are ragged ends: under a cap two buffers a thread do, and what they take is left out of the account.
    from zoo.shard.offload.budget import HostBudget
    from zoo.shard.offload.scratch import Scratch, handle_of

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
