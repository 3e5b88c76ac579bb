"""From a model to the plan of its buckets, and which parameters are tables of embeddings, whose gradients may travel as
the rows that were touched. Nothing is communicated, and no memory moves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.layout import logical_name, split_of
from zoo.shard.agreement import short_digest
from zoo.shard.placement.families import family_of
from zoo.shard.placement.packing import BucketSpec, plan_buckets
from zoo.shard.placement.precision import COMPUTES, Precision
from zoo.shard.placement.units import UnitChoice, UnitSpec, find_units

if TYPE_CHECKING:
    from zoo.shard.config import ZeroConfig


def plan_model(
    module: nn.Module, units: UnitChoice | None, config: ZeroConfig, *, precision: Precision,
    group_of: Callable[[nn.Parameter], int], sparse: bool, mesh: Any = None,
) -> tuple[list[UnitSpec], list[BucketSpec], str]:  # fmt: skip
    """Units, buckets, and a digest of their layout, by which ranks tell that they have the same."""
    specs = find_units(module, units)
    plan = plan_buckets(
        specs,
        config,
        precision,
        group_of=group_of,
        is_table=find_tables(module) if sparse else lambda parameter: False,
        size_of=partial(_size, mesh),
    )
    for spec in plan:
        spec.logical = {name: logical_name(module, name) for name in spec.names}
    described = [
        (b.names, [tuple(p.shape) for p in b.parameters], [b.original, b.dtype, b.gather], b.groups, b.axes, b.row)
        for b in plan
    ]  # fmt: skip
    return specs, plan, short_digest(described)


def _size(mesh: Any, parameter: nn.Parameter) -> int:
    """Elements; of a part the mean of all parts, rounded up: parts may be uneven, and no rank sees the others'."""
    split = split_of(parameter)
    if mesh is None or split.shape is None or not set(split.axes) <= set(mesh.mesh_dim_names or ()):
        return parameter.numel()
    sizes: list[int] = [mesh.size(mesh.mesh_dim_names.index(axis)) for axis in split.axes]
    return -(-math.prod(split.shape) // math.prod(sizes))


def described_parameters(plan: Iterable[BucketSpec]) -> dict[str, str]:
    """By name the shape, type and group of each parameter, as a text."""
    found: dict[str, str] = {}
    for b in plan:
        for name, parameter, group in zip(b.names, b.parameters, b.groups, strict=True):
            dtype = str(b.original).removeprefix("torch.")
            place = ", frozen" if not b.trainable else f" of group {group}" if group else ""
            found[name] = f"{tuple(parameter.shape)} {dtype}{place}"
    return found


_log = logging.getLogger("zoo.zero")
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def check_rows(given: Any, config: ZeroConfig) -> None:
    """Raise ValueError for a ``sparse_gradients`` that is no bool, or next to an option that reduces in its own way."""
    if not isinstance(given, bool):
        raise ValueError(f"sparse_gradients={given!r}; allowed are True and False.")
    for name in refuses_rows(config) if given else ():
        raise ValueError(
            f"sparse_gradients=True with {name}: rows of a table travel between all ranks at once and as they are. "
            "Leave one of the two out."
        )


def refuses_rows(config: ZeroConfig) -> list[str]:
    """The options that are set, and reduce gradients in another way."""
    others = {
        "zero_quantized_gradients": config.zero_quantized_gradients,
        "hierarchical_all_reduce": config.hierarchical_all_reduce,
        "mics_shard_size": config.mics_shard_size != -1,
    }
    return [name for name, on in others.items() if on]


def find_tables(model: nn.Module) -> Callable[[torch.Tensor], bool]:
    """Whether a parameter is a table: the trainable weight of ``nn.Embedding`` or ``nn.EmbeddingBag`` and of no other
    module, whole on a rank. One that an output layer has too (tied weights) gets a gradient for every row, and is none;
    nor is one of which ranks along other mesh axes have parts. Both are said."""
    found: dict[int, nn.Parameter] = {}
    elsewhere: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(module, _TABLES) and name == "weight":
                found[id(parameter)] = parameter
            else:
                elsewhere.add(id(parameter))
    trained = {key for key, p in found.items() if p.requires_grad and p.numel() and p.dtype in COMPUTES}
    names = {id(p): name for name, p in model.named_parameters()}
    tied = sorted(names[key] for key in trained & elsewhere)
    parts = {key for key in trained - elsewhere if family_of(found[key])}
    tables = trained - elsewhere - parts
    if tied:
        _log.info("the gradient of %s travels whole: other modules have this table too", ", ".join(map(repr, tied)))
    if parts:
        apart = ", ".join(sorted(repr(names[key]) for key in parts))
        _log.info("the gradient of %s travels whole: ranks have parts of this table", apart)
    if not tables:
        _log.warning(
            "sparse_gradients=True has no effect: the model has no trainable weight of nn.Embedding or nn.EmbeddingBag "
            "that no other module has and that is whole on a rank"
        )
    return lambda parameter: id(parameter) in tables
