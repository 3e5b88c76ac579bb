"""Which parameters share a flat buffer: decided before any memory moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from zoo.layout import FlatLayout, LogicalTensor
from zoo.shard.placement.families import family_of
from zoo.shard.placement.precision import Precision, compute_dtype
from zoo.shard.placement.units import UnitSpec
from zoo.shard.quantised_parameters import class_of

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig

_ALIGN_BYTES = 64  # a cache line: parameters and shards start on one


_Key = tuple[tuple[torch.dtype, torch.dtype, torch.dtype], bool, bool, tuple[str, ...], str, type[nn.Parameter]]


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
    axes: tuple[str, ...] = ()
    """Mesh axes along which ranks have different parts of these parameters."""
    group_size: int = 0
    """Elements that share a scale when something of the bucket is quantised: chunks are whole numbers of them."""

    row: int = 0
    """Of a table whose gradient may travel as rows, and which is alone here: elements of a row. Chunks are whole rows.
    0 for everything else."""

    logical: dict[str, str] = field(default_factory=dict)
    """Names in the whole model, where they are other ones."""

    came_in: torch.dtype | None = None
    """The dtype in which the parameters came, where ``dtype`` is another one, that they are computed with."""
    keeps_originals: bool = False
    """The values that they came with are kept: as masters, or beside frozen parameters."""
    cls: type[nn.Parameter] = nn.Parameter
    """Of the parameters. Another one has codes (``quantised_parameters.py``), which nothing may round."""

    gather: torch.dtype | None = None
    """The dtype in which parameters travel where they are partitioned, where it is another one than ``dtype``."""

    accumulate: torch.dtype | None = None
    """The dtype of gradients on this rank, where it is another one than ``dtype``."""

    mean_numel: int = 0
    """Elements as packing counts them: of parts the mean over ranks with other parts, the same on all of them."""

    @property
    def coded(self) -> bool:
        """Its elements are codes, whatever their dtype."""
        return self.cls is not nn.Parameter

    @property
    def original(self) -> torch.dtype:
        """The dtype in which the parameters came."""
        return self.dtype if self.came_in is None else self.came_in

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up and kept."""
        return self.dtype if self.accumulate is None else self.accumulate


def plan_buckets(
    units: Sequence[UnitSpec], config: ZeroConfig, precision: Precision, *, group_of: Callable[[nn.Parameter], int],
    is_table: Callable[[nn.Parameter], bool], size_of: Callable[[nn.Parameter], int],
) -> list[BucketSpec]:  # fmt: skip
    """Coalesce the parameters of consecutive units into buckets of at most ``config.bucket_size`` elements.

    A unit is never split, so a bucket is larger than that when a unit alone is. Parameters of at most
    ``param_persistence_threshold`` elements are *resident* (whole on every rank at stage 3 too) until
    ``model_persistence_threshold`` elements are. Parameters that are parts along other mesh axes travel between other
    ranks, and have buckets of their own. A unit that contains other units has buckets of its own: it is
    open while they run, and would keep what it shares a bucket with gathered. The parameters of a
    bucket have one dtype, which ``precision`` says, and they came in one too and travel in one; so have their
    gradients. A parameter that ``is_table`` has a bucket of its own, and its ``row`` is set. ``size_of`` counts
    elements: ranks with other parts of the same tensors get the same buckets only if they count alike.
    """
    buckets: list[BucketSpec] = []
    still_open: dict[_Key, BucketSpec] = {}
    budget = config.model_persistence_threshold
    for unit in units:
        own: dict[_Key, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters.items():
            size = size_of(parameter)
            resident = size <= config.param_persistence_threshold and size <= budget
            budget -= size if resident else 0
            computed = compute_dtype(parameter, precision.param)
            dtypes = computed, parameter.dtype, _gather_dtype(computed, precision.gather.get(name))
            axes = family_of(parameter)
            table = name if is_table(parameter) else ""
            key = (dtypes, parameter.requires_grad, resident, axes, table, class_of(parameter))
            own.setdefault(key, []).append((name, parameter))
        alone = any(o is not unit and (unit.name == "" or o.name.startswith(unit.name + ".")) for o in units)
        for key, members in own.items():
            size = sum(size_of(p) for _, p in members)
            spec = still_open.get(key)
            if alone or spec is None or sum(map(size_of, spec.parameters)) + size > config.bucket_size:
                (dtype, original, travels), trainable, resident, axes, table, cls = key
                spec = BucketSpec(dtype, trainable, resident, [], [], [], [], axes, came_in=original, cls=cls)
                spec.gather = travels if travels is not dtype else None
                if trainable and precision.accumulate is not dtype:
                    spec.accumulate = precision.accumulate
                if table:
                    spec.row = members[0][1].shape[1]
                buckets.append(spec)
                if not alone:
                    still_open[key] = spec
            spec.units.append(unit.name)
            for name, parameter in members:
                spec.names.append(name)
                spec.parameters.append(parameter)
                spec.mean_numel += size_of(parameter)
                spec.groups.append(group_of(parameter))
    for spec in buckets:
        # Parameters of one group lie together, so that the optimizer sees one tensor a group, not one a parameter.
        order = sorted(range(len(spec.names)), key=lambda i: spec.groups[i])
        spec.names = [spec.names[i] for i in order]
        spec.parameters = [spec.parameters[i] for i in order]
        spec.groups = [spec.groups[i] for i in order]
    return buckets


def _gather_dtype(computed: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """In which parameters travel that are computed with in ``computed``: nothing becomes wider on its way."""
    return wanted if wanted is not None and wanted.itemsize < computed.itemsize else computed


def layout_of(spec: BucketSpec, num_chunks: int) -> FlatLayout:
    """The flat buffer of a bucket."""
    align = max(_ALIGN_BYTES // spec.dtype.itemsize, 1)
    tensors = [
        LogicalTensor(name=name, shape=tuple(p.shape), dtype=str(spec.dtype).removeprefix("torch."))
        for name, p in zip(spec.names, spec.parameters, strict=True)
    ]
    multiple = math.lcm(align, spec.group_size or 1, spec.row or 1)
    return FlatLayout.pack(tensors, align=align, multiple=multiple * num_chunks)
