"""From a model to the plan of its buckets. Nothing is communicated, and no memory moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch import nn

from zoo.layout import logical_name
from zoo.shard.config import ZeroConfig
from zoo.shard.placement.families import family_of
from zoo.shard.placement.packing import BucketSpec, plan_buckets
from zoo.shard.placement.precision import Precision
from zoo.shard.placement.tables import find_tables
from zoo.shard.placement.units import UnitChoice, UnitSpec, find_units


def plan_model(
    module: nn.Module, units: UnitChoice | None, config: ZeroConfig, *, precision: Precision,
    group_of: Callable[[nn.Parameter], int], sparse: bool,
) -> tuple[list[UnitSpec], list[BucketSpec], str]:  # fmt: skip
    """Units, buckets, and a digest of their layout, by which ranks tell that they have the same."""
    specs = find_units(module, units)
    plan = plan_buckets(
        specs,
        bucket_size=config.bucket_size,
        persistence_threshold=config.param_persistence_threshold,
        model_persistence_threshold=config.model_persistence_threshold,
        group_of=group_of,
        axes_of=lambda name, parameter: family_of(parameter),
        precision=precision,
        is_table=find_tables(module) if sparse else lambda parameter: False,
    )
    for spec in plan:
        spec.logical = {name: logical_name(module, name) for name in spec.names}
    described = [
        (b.names, [tuple(p.shape) for p in b.parameters], f"{b.original} as {b.dtype}", b.groups, b.axes, b.row)
        for b in plan
    ]  # fmt: skip
    return specs, plan, hashlib.blake2b(repr(described).encode(), digest_size=8).hexdigest()
