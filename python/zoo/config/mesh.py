"""The ``mesh`` section: named axes of the ranks of a job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field, StrictInt

from zoo.config.section import Section

if TYPE_CHECKING:
    from zoo.config.core import Config

__all__ = ["LAYER_AXES", "Mesh", "MeshError", "batch_axes", "data_axes", "layer_axes", "resolve"]

LAYER_AXES = ("pipe",)
"""Axes along which ranks have other layers, where nothing else is said."""
PART_AXES = ("tensor",)
"""Axes along which ranks have parts of the same layers and see the same samples."""
SAMPLE_AXES = ("sequence",)
"""Data axes along which ranks see parts of the same samples."""


class MeshError(ValueError):
    """Axes that do not fit the number of ranks."""


class Mesh(Section):
    """Named axes of the job's ranks, outermost first: rank = (i · B + j) · C + k at (i, j, k) of axes of sizes A, B, C.

    Without axes all ranks are data-parallel.
    """

    axes: dict[str, StrictInt] = Field(default_factory=dict)
    """Name of each axis and its size; one of them may be -1, "what is left". Such as {"pipe": 2, "data": -1}."""
    data: list[str] | None = None
    """Axes over which losses are averaged; default: all but "pipe" and "tensor"."""
    layers: list[str] | None = None
    """Axes along which ranks have other layers; default: "pipe" if it is there."""
    batch: list[str] | None = None
    """Data axes along which ranks see other samples; default: the data axes but "sequence"."""

    def contradictions(self, config: Config) -> Iterable[str]:
        names = list(self.axes)
        for key in ("data", "layers", "batch"):
            given: list[str] = getattr(self, key) or []
            unknown = [name for name in given if name not in names]
            if unknown:
                yield f"mesh.{key}: {', '.join(unknown)}: no such axis; mesh.axes has {', '.join(names) or 'none'}"
            if len(set(given)) < len(given):
                yield f"mesh.{key}: {', '.join(given)}: name each axis once"
        both = sorted(set(self.data_axes) & set(self.layer_axes))
        if both:
            yield f"mesh: {', '.join(both)} is in data and in layers; an axis is for one of them"
        beside = sorted(set(self.batch_axes) - set(self.data_axes))
        if beside:
            yield f"mesh.batch: {', '.join(beside)} is no data axis ({', '.join(self.data_axes)})"

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over which losses are averaged."""
        return data_axes(self.axes) if self.data is None else tuple(self.data)

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Axes along which ranks have other layers."""
        return layer_axes(self.axes) if self.layers is None else tuple(self.layers)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which ranks see other samples."""
        return batch_axes(self.data_axes) if self.batch is None else tuple(self.batch)

    def sizes(self, world_size: int) -> dict[str, int]:
        """Size of each axis for so many ranks; raises MeshError if they do not fit."""
        return resolve(self.axes, world_size)

    def batch_ranks(self, world_size: int) -> int:
        """Into how many parts a batch is cut."""
        if not self.axes:
            return world_size
        sizes = self.sizes(world_size)
        return math.prod(sizes[name] for name in self.batch_axes if name in sizes)


def data_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Of axes that say nothing but their names: those over which losses are averaged."""
    return tuple(name for name in names if name not in LAYER_AXES and name not in PART_AXES)


def layer_axes(names: Iterable[str]) -> tuple[str, ...]:
    """Of axes that say nothing but their names: those along which ranks have other layers."""
    return tuple(name for name in names if name in LAYER_AXES)


def batch_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Of data axes that say nothing but their names: those along which ranks see other samples."""
    return tuple(name for name in names if name not in SAMPLE_AXES)


def resolve(axes: dict[str, int], world_size: int) -> dict[str, int]:
    """Sizes with -1 filled in.

    Raises:
        MeshError: sizes whose product is not the number of ranks.
    """
    shown = " × ".join(f"{name} {size}" for name, size in axes.items())
    wrong = [name for name, size in axes.items() if size < 1 and size != -1]
    if wrong or list(axes.values()).count(-1) > 1:
        raise MeshError(f"mesh.axes: {shown}; sizes are positive, and one of them may be -1 for what is left")
    known = math.prod(size for size in axes.values() if size != -1)
    if world_size % known or (-1 not in axes.values() and known != world_size):
        raise MeshError(f"mesh.axes: {shown} is no mesh of {world_size} ranks; the product of the sizes must be that")
    return {name: world_size // known if size == -1 else size for name, size in axes.items()}
