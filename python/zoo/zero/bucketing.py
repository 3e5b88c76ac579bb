"""What is split, and which parameters share a flat buffer: decided before any memory moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zoo.layout import FlatLayout, LogicalTensor
from zoo.zero.units import UnitSpec

_ALIGN_BYTES = 64  # a cache line: parameters and shards start on one


@dataclass(frozen=True, kw_only=True)
class Placement:
    """What is split over the data-parallel ranks. The four ZeRO stages are four of these."""

    shard_optimizer: bool
    shard_gradients: bool
    shard_parameters: bool
    keep_gradients: bool = True
    """Reduced gradients stay until ``zero_grad``; otherwise each until its update, before backward ends."""


STAGES = {
    0: Placement(shard_optimizer=False, shard_gradients=False, shard_parameters=False),
    1: Placement(shard_optimizer=True, shard_gradients=False, shard_parameters=False),
    2: Placement(shard_optimizer=True, shard_gradients=True, shard_parameters=False),
    3: Placement(shard_optimizer=True, shard_gradients=True, shard_parameters=True),
}


@dataclass(eq=False)
class BucketSpec:
    """The plan of a bucket: which parameters, in which order."""

    dtype: torch.dtype
    trainable: bool
    resident: bool
    names: list[str]
    parameters: list[nn.Parameter]
    groups: list[int]
    units: list[str]
    group_size: int = 0
    """Elements that share a scale when something of the bucket is quantised: chunks are whole numbers of them."""

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(p.numel() for p in self.parameters)


def plan_buckets(
    units: Sequence[UnitSpec],
    *,
    bucket_size: int,
    persistence_threshold: int,
    model_persistence_threshold: int,
    group_of: Callable[[nn.Parameter], int],
) -> list[BucketSpec]:
    """Coalesce the parameters of consecutive units into buckets of at most ``bucket_size`` elements.

    A unit is never split, so a bucket is larger than ``bucket_size`` when a unit alone is. Parameters of at most
    ``persistence_threshold`` elements are *resident* (whole on every rank at stage 3 too) until
    ``model_persistence_threshold`` elements are. A unit that contains other units has buckets of its own: it is open
    while they run, and would keep what it shares a bucket with gathered.
    """
    buckets: list[BucketSpec] = []
    still_open: dict[tuple[torch.dtype, bool, bool], BucketSpec] = {}
    budget = model_persistence_threshold
    for unit in units:
        own: dict[tuple[torch.dtype, bool, bool], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters.items():
            resident = parameter.numel() <= persistence_threshold and parameter.numel() <= budget
            budget -= parameter.numel() if resident else 0
            own.setdefault((parameter.dtype, parameter.requires_grad, resident), []).append((name, parameter))
        alone = any(o is not unit and (unit.name == "" or o.name.startswith(unit.name + ".")) for o in units)
        for key, members in own.items():
            size = sum(p.numel() for _, p in members)
            spec = still_open.get(key)
            if alone or spec is None or spec.numel + size > bucket_size:
                spec = BucketSpec(*key, names=[], parameters=[], groups=[], units=[])
                buckets.append(spec)
                if not alone:
                    still_open[key] = spec
            spec.units.append(unit.name)
            for name, parameter in members:
                spec.names.append(name)
                spec.parameters.append(parameter)
                spec.groups.append(group_of(parameter))
    for spec in buckets:
        # Parameters of one group lie together, so that the optimizer sees one tensor a group, not one a parameter.
        order = sorted(range(len(spec.names)), key=lambda i: spec.groups[i])
        spec.names = [spec.names[i] for i in order]
        spec.parameters = [spec.parameters[i] for i in order]
        spec.groups = [spec.groups[i] for i in order]
    return buckets


def layout_of(spec: BucketSpec, num_chunks: int) -> FlatLayout:
    """The flat buffer of a bucket."""
    align = max(_ALIGN_BYTES // spec.dtype.itemsize, 1)
    tensors = [
        LogicalTensor(name=name, shape=tuple(p.shape), dtype=str(spec.dtype).removeprefix("torch."))
        for name, p in zip(spec.names, spec.parameters, strict=True)
    ]
    return FlatLayout.pack(tensors, align=align, multiple=math.lcm(align, spec.group_size or 1) * num_chunks)
