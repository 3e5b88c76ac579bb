"""Which rank stands where: n-dimensional grids of ranks with named axes. Pure arithmetic, no process group."""

from __future__ import annotations

import itertools
import keyword
import math
import operator
from collections import namedtuple
from collections.abc import Collection, Sequence
from typing import Any

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """Ranks 0 … N-1 at the coordinates of a grid with named axes, N = product of ``dims``.

    Row-major: rank = ((c_0 · d_1 + c_1) · d_2 + c_2) · …, so neighbours on the last axis are neighbours in rank. With
    ``axes=["x", "y"]`` the ranks of (x, y) and (x, y+1) are adjacent, with ``axes=["y", "x"]`` those of (x, y) and
    (x+1, y).

    Args:
        axes: the names, outermost first, each once; Python identifiers that do not begin with an underscore.
        dims: size of each axis, 1 or more.

    Raises:
        ValueError: names or sizes that make no grid.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), [d if isinstance(d, bool) else _integer(d) for d in dims]
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes) or not self.axes:
            raise ValueError(
                f"a topology got axes={self.axes} and dims={self.dims}; give one size for each distinct axis."
            )
        if any(type(d) is not int or d < 1 for d in self.dims):
            raise ValueError(f"a topology got dims={self.dims} for {self.axes}; every size is an integer of 1 or more.")
        if bad := [axis for axis in self.axes if not _is_name(axis)]:
            raise ValueError(
                f"a topology got the axis {bad[0]!r}; a name is letters, digits and underscores, as 'pipe', and no "
                "keyword of Python."
            )
        coord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord
        self._coords = [coord(*c) for c in itertools.product(*map(range, self.dims))]
        self.mapping: dict[Any, int] = {at: rank for rank, at in enumerate(self._coords)}

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Name → size, outermost first: ``init_device_mesh(device, tuple(a.values()), mesh_dim_names=tuple(a))``."""
        return dict(zip(self.axes, self.dims, strict=True))

    def get_rank(self, /, **coord_kwargs: int) -> int:
        """The rank at these coordinates, one for every axis.

        Raises:
            ValueError: an axis is missing or unknown, or there is nobody at these coordinates.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank got coordinates on {sorted(coord_kwargs)} of a topology with the axes {self.axes}; give one "
                "for each axis (filter_match takes some of them)."
            )
        coord = self.ProcessCoord(*(coord_kwargs[axis] for axis in self.axes))
        if coord not in self.mapping:
            raise ValueError(f"nobody is at {coord}: the sizes of the axes are {self.mesh_axes}.")
        return self.mapping[coord]

    def get_axis_names(self) -> list[str]:
        """The axes, outermost first."""
        return list(self.axes)

    def get_rank_repr(
        self, rank: int, omit_axes: Collection[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The coordinates of a rank as text, such as ``a_01-b_01``: what names of checkpoint files are made of.

        Args:
            rank: of this topology.
            omit_axes: axes that the text does without; one name, or several.
            inner_sep: between an axis and its coordinate (two digits or more).
            outer_sep: between axes.
        """
        coord = self.get_coord(rank)
        omitted = {omit_axes} if isinstance(omit_axes, str) else set(omit_axes)
        kept = [axis for axis in self.axes if axis not in omitted]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Ranks along an axis; 0 for an axis that this topology does not have."""
        return self.mesh_axes.get(axis, 0)

    def get_coord(self, rank: int) -> Any:
        """The namedtuple ``ProcessCoord`` of a rank, with the axes as fields.

        Raises:
            ValueError: no such rank.
        """
        number = _integer(rank)
        if type(number) is not int or not 0 <= number < len(self._coords):
            raise ValueError(f"rank {rank!r} is not in this topology: its ranks are 0 to {len(self._coords) - 1}.")
        return self._coords[number]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups along an axis: lists of ranks that differ in this coordinate alone, in its order.

        An axis that this topology does not have has no groups: [].
        """
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coord in enumerate(self._coords):
            found.setdefault(tuple(getattr(coord, name) for name in others), []).append(rank)
        return list(found.values())

    def filter_match(self, /, **filter_kwargs: int) -> list[int]:
        """All ranks, ascending, with these coordinates; axes that are not named may have any.

        Raises:
            ValueError: an unknown axis.
        """
        if unknown := sorted(set(filter_kwargs) - set(self.axes)):
            raise ValueError(f"filter_match got {unknown[0]!r}; the axes of this topology are {self.axes}.")
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks, ascending, whose coordinate on ``axis`` is ``idx``.

        Raises:
            ValueError: an unknown axis.
        """
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.dims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessTopology) and (self.axes, self.dims) == (other.axes, other.dims)

    def __hash__(self) -> int:
        return hash((tuple(self.axes), tuple(self.dims)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{axis}={size}' for axis, size in self.mesh_axes.items())})"


def _is_name(axis: Any) -> bool:
    return isinstance(axis, str) and axis.isidentifier() and not axis.startswith("_") and not keyword.iskeyword(axis)


def _integer(size: Any) -> Any:
    """Integers of other libraries as Python's; what is none stays as it is."""
    try:
        return operator.index(size)
    except TypeError:
        return size


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines of ``num_pp`` ranks, ``num_dp`` times; ranks that share a stage are neighbours (axes pipe, data)."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and tensor ("model") parallelism; ranks of one layer are neighbours (axes pipe, data, model)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])
