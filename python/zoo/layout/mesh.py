"""Meshes of ranks, and flat buffers sharded over some of their axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zoo.layout.flat import FlatLayout, Piece


@dataclass(frozen=True)
class Mesh:
    """Ranks 0..N-1 arranged row-major on named axes, the last axis fastest: ``Mesh(("node", "local"), (2, 4))``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"a mesh needs one size for each distinct axis; got axes {self.axes}, sizes {self.sizes}.")
        if any(s < 1 for s in self.sizes):
            raise ValueError(f"every mesh axis has at least one rank; got sizes {self.sizes}.")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The position of ``rank`` on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside this mesh of {self.world_size} ranks.")
        found = []
        for size in reversed(self.sizes):
            rank, position = divmod(rank, size)
            found.append(position)
        return tuple(reversed(found))


@dataclass(frozen=True)
class Sharding:
    """A flat layout cut over ``axes`` of a mesh and replicated over the mesh's other axes.

    The shard of a rank has index = its coordinates on ``axes`` read as a mixed-radix number, first axis slowest. No
    axes means every rank holds the whole buffer (stage 0); all of them means every rank holds a part of its own.
    """

    layout: FlatLayout
    mesh: Mesh
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [a for a in self.axes if a not in self.mesh.axes]
        if unknown or len(set(self.axes)) != len(self.axes):
            raise ValueError(
                f"cannot shard over {self.axes}: the mesh has the axes {self.mesh.axes}, each usable once."
            )
        self.layout.shard_range(0, self.num_shards)

    @property
    def num_shards(self) -> int:
        """Into how many parts the buffer is cut."""
        return math.prod(self.mesh.sizes[self.mesh.axes.index(a)] for a in self.axes)

    def shard_index(self, rank: int) -> int:
        """Which part ``rank`` holds."""
        where = dict(zip(self.mesh.axes, self.mesh.coordinates(rank), strict=True))
        index = 0
        for axis in self.axes:
            index = index * self.mesh.sizes[self.mesh.axes.index(axis)] + where[axis]
        return index

    def range_of(self, rank: int) -> tuple[int, int]:
        """[start, stop) of the flat buffer held by ``rank``."""
        return self.layout.shard_range(self.shard_index(rank), self.num_shards)

    @property
    def num_ranks(self) -> int:
        """Of the mesh."""
        return self.mesh.world_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors, whole."""
        return {tensor.name: tensor.shape for tensor in self.layout.tensors}

    def pieces_of(self, rank: int) -> list[Piece]:
        """What ``rank`` holds, with offsets into its shard."""
        return self.layout.pieces(*self.range_of(rank))
