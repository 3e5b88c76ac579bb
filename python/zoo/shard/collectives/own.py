"""Routes of one's own in the place of those that the options chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zoo.comm import raise_together
from zoo.shard.agreement import of_object
from zoo.shard.offload.tiers import Tier

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.shard.buckets import Bucket
    from zoo.shard.collectives.routes import Routes

_FIXED = ("axes", "secondary", "feedback", "reduces_whole", "switch")
_WAYS = ("gather", "exact", "reduce", "pack")


def use_routes(buckets: Sequence[Bucket], choose: Callable[[Bucket], Routes], comm: Communicator) -> None:
    """Let each bucket travel as ``choose(bucket)`` says. Collective; nothing is gathered or under way.

    Raises:
        ValueError: a bucket's routes cannot be changed so. CollectiveMismatchError: ranks chose otherwise.
    """
    with raise_together(comm, "use_routes()"):
        chosen = [choose(bucket) for bucket in buckets]
        for bucket, routes in zip(buckets, chosen, strict=True):
            _check(bucket, routes)
    told = [[of_object(getattr(routes, name), _travels) for name in _WAYS] for routes in chosen]
    comm.agree("the routes of buckets:", str(told), buckets[0].device)
    with raise_together(comm, "use_routes()"):  # what packs may fail
        for bucket, routes in zip(buckets, chosen, strict=True):
            bucket.use_routes(routes)


def _check(bucket: Bucket, routes: Routes) -> None:
    before = bucket.routes
    other = [name for name in _FIXED if getattr(routes, name) is not getattr(before, name)]
    if other:
        raise ValueError(
            f"use_routes() was given routes of {bucket.label} with other {', '.join(other)}; what may change is "
            f"{', '.join(_WAYS)}: dataclasses.replace(bucket.routes, gather=...) leaves the rest."
        )
    if routes.pack is before.pack:
        return
    where = "trained" if bucket.spec.trainable else "" if bucket.partitioned else "whole on each rank"
    if not where and bucket.placements.parameters.tier is Tier.NVME:
        where = "on NVMe"
    if where:
        raise ValueError(
            f"use_routes() was given another pack for {bucket.label}, which is {where}: what packs chunks serves "
            "frozen parameters that are split (stage 3) and in memory."
        )


def _travels(value: Any) -> bool:
    return hasattr(value, "hops")
