"""The routes of each bucket: those that the options choose, or one's own in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zoo.comm import raise_together
from zoo.shard.agreement import of_object
from zoo.shard.collectives.routes import Routes, cast_routes, plain_routes
from zoo.shard.offload.tiers import Tier
from zoo.shard.placement.axes import Axes
from zoo.shard.placement.packing import BucketSpec, layout_of
from zoo.shard.placement.placements import Placements

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.shard.buckets import Bucket
    from zoo.shard.collectives.routes import Switch
    from zoo.shard.config import ZeroConfig
    from zoo.shard.placement.precision import Precision


def choose_routes(
    plan: Sequence[BucketSpec], placements: Sequence[Placements], axes: Mapping[tuple[str, ...], Axes],
    config: ZeroConfig, precision: Precision, switch: Switch | None = None,
) -> list[Routes]:  # fmt: skip
    """How each bucket travels. Sets the ``group_size`` of those of which something is quantised.

    ``switch``: whether gradients are left to an optimizer that brings ranks together by itself; None: they never are.

    Raises:
        ImportError: something is to be quantised and zoo-kernels is not installed.
        ValueError: options that exclude each other.
        NotImplementedError: for a dtype that cannot be quantised.
    """
    predivide = precision.predivide
    if predivide != 1.0 and config.zero_quantized_gradients:
        raise ValueError(
            f"predivide={predivide} with zero_quantized_gradients: quantised gradients have scales and overflow "
            "nowhere. Leave one of the two out."
        )
    staged = config.mics_hierarchical_params_gather
    every = {key: plain_routes(of, two_stages=staged, predivide=predivide) for key, of in axes.items()}
    found = _choose(plan, placements, every, config, precision.reduce)
    for number, (spec, placed) in enumerate(zip(plan, placements, strict=True)):
        if spec.gather is None or not placed.parameters.is_split or found[number].axes.shard.size == 1:
            continue  # nothing is gathered
        if found[number].pack is not None or found[number].gather is not found[number].exact:
            raise ValueError(
                f"Precision(gather=) of {spec.names[0]!r} with zero_quantized_weights or "
                "zero_quantized_nontrainable_weights: both say how parameters travel. Leave one of the two out."
            )
        found[number] = cast_routes(found[number], spec.gather)
    if switch is not None:
        from zoo.shard.collectives.compressed import left_to_the_optimizer  # the only part that needs a codec

        return [
            left_to_the_optimizer(route, spec, placed, switch, predivide) if spec.trainable else route
            for route, spec, placed in zip(found, plan, placements, strict=True)
        ]
    return [
        with_rows(route, spec, placed, predivide) if spec.row and route.axes.shard.size > 1 else route
        for route, spec, placed in zip(found, plan, placements, strict=True)
    ]


def cannot_be_left(plan: Sequence[BucketSpec], config: ZeroConfig) -> NotImplementedError | None:
    """What is wrong with leaving gradients to an optimizer that brings ranks together by itself; None for nothing."""
    other = "zero_quantized_gradients" if config.zero_quantized_gradients else ""
    other = "sparse_gradients" if any(spec.row for spec in plan) else other
    if not other:
        return None
    return NotImplementedError(
        f"{other} with an optimizer that compresses what ranks tell each other: both change how gradients travel. "
        "Leave one of the two out."
    )


def with_rows(routes: Routes, spec: BucketSpec, placed: Placements, predivide: float) -> Routes:
    """The gradient of the table ``spec`` travels as rows, where these are few."""
    from zoo.shard.collectives.rows import RowReduce

    whole = not placed.gradients.is_split and not placed.states.is_split
    rows, width = spec.parameters[0].shape
    reduce = RowReduce(routes.reduce, routes.axes, (rows, width), whole=whole, predivide=predivide)
    return dataclasses.replace(routes, reduce=reduce, reduces_whole=whole)


def _choose(
    plan: Sequence[BucketSpec], placements: Sequence[Placements], every: Mapping[tuple[str, ...], Routes],
    config: ZeroConfig, reduce_dtype: torch.dtype | None,
) -> list[Routes]:  # fmt: skip
    if not (
        config.zero_quantized_weights or config.zero_quantized_gradients or config.zero_quantized_nontrainable_weights
    ):
        return [every[spec.axes] for spec in plan]
    from zoo.shard.collectives import quantised  # the only part that needs zoo-kernels

    found = []
    for spec, placed in zip(plan, placements, strict=True):
        plain = every[spec.axes]
        weights = config.zero_quantized_weights and not spec.coded
        stored = placed.parameters.packed
        gradients = config.zero_quantized_gradients and spec.trainable
        if not placed.parameters.is_split or not (weights or stored or gradients):
            found.append(plain)
            continue
        quantised.check_dtypes(spec.names, spec.dtype, (reduce_dtype or spec.accumulate) if gradients else None)
        num_chunks = plain.axes.shard.size
        spec.group_size = quantised.group_size_of(layout_of(spec, num_chunks).size // num_chunks)
        bits = config.quantized_gradients_bits if gradients else None
        found.append(
            quantised.quantised_routes(
                plain,
                spec.group_size,
                weights=weights,
                stored=stored,
                gradient_bits=bits,
                feedback=layout_of(spec, num_chunks) if config.quantized_gradients_feedback else None,
            )
        )
    return found


# Routes of one's own -------------------------------------------------------------------------------------------------

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
