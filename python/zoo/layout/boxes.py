"""Boxes: rectangular parts of tensors, and what runs of their row-major order are in boxes.

Legend: d dims; s = (s_1, …, s_d) the sizes of a box; its elements in *row-major order* have the numbers 0 to
s_1 ··· s_d - 1, the last dim fastest; a *run* [start, stop) is consecutive numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Box:
    """Elements (x_1, …, x_d) of a tensor with offsets_i <= x_i < offsets_i + sizes_i. With d = 0: its one element.

    ``offsets`` count in the whole tensor, on whatever rank the box is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or min((*self.offsets, *self.sizes), default=0) < 0:
            raise ValueError(
                f"a box got offsets {self.offsets} and sizes {self.sizes}; it takes one offset and one size, both >= "
                "0, for each dim of its tensor."
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index, in each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def ranges(self) -> tuple[slice, ...]:
        """What indexes it: ``tensor[box.ranges]``."""
        return tuple(slice(low, high) for low, high in zip(self.offsets, self.stops, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """How far apart the numbers of neighbours are in each dim, in the box's own row-major order."""
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it is a box of a tensor of this shape."""
        return len(self.sizes) == len(shape) and all(s <= d for s, d in zip(self.stops, shape, strict=True))

    def runs_in(self, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(start, length) of the runs that it is in the row-major order of a tensor of ``shape``, in its own order."""
        # The last dims that are whole are one run with the dim before them.
        dim = len(self.sizes)
        while dim and self.sizes[dim - 1] == shape[dim - 1]:
            dim -= 1
        strides = Box.whole(shape).strides
        length = math.prod(self.sizes[max(dim - 1, 0) :])
        starts = [sum(o * s for o, s in zip(self.offsets, strides, strict=True))]
        for size, stride in zip(self.sizes[: max(dim - 1, 0)], strides, strict=False):
            starts = [start + x * stride for start in starts for x in range(size)]
        return ((start, length) for start in starts if length)

    def is_run_in(self, shape: Sequence[int]) -> bool:
        """Whether its elements are consecutive in the row-major order of a tensor of ``shape``."""
        dim = next((i for i, size in enumerate(self.sizes) if size != 1), len(self.sizes))
        return self.sizes[dim + 1 :] == tuple(shape[dim + 1 :]) or not self.numel

    def intersection(self, other: Box) -> Box | None:
        """What is in both boxes of one tensor, None if that is nothing.

        Raises:
            ValueError: they have different numbers of dims.
        """
        if len(self.sizes) != len(other.sizes):
            raise ValueError(
                f"{self} has {len(self.sizes)} dims and {other} has {len(other.sizes)}; boxes of one tensor have the "
                "same number."
            )
        offsets = tuple(max(pair) for pair in zip(self.offsets, other.offsets, strict=True))
        stops = tuple(min(pair) for pair in zip(self.stops, other.stops, strict=True))
        sizes = tuple(stop - offset for offset, stop in zip(offsets, stops, strict=True))
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None

    def minus(self, other: Box) -> list[Box]:
        """What is in this box and not in ``other``, in at most 2d boxes that do not overlap.

        One slab below and one above ``other`` in the first dim, then the same in the next dim of what is between them.
        """
        common = self.intersection(other)
        if common is None:
            return [self] if self.numel else []
        found = []
        offsets, sizes = list(self.offsets), list(self.sizes)
        for dim, (low, high) in enumerate(zip(common.offsets, common.stops, strict=True)):
            end = offsets[dim] + sizes[dim]
            for start, stop in ((offsets[dim], low), (high, end)):
                if start < stop:
                    found.append(
                        Box(
                            (*offsets[:dim], start, *offsets[dim + 1 :]),
                            (*sizes[:dim], stop - start, *sizes[dim + 1 :]),
                        )
                    )
            offsets[dim], sizes[dim] = low, high - low
        return found

    def number_of(self, index: Sequence[int]) -> int:
        """The number of an element in this box's row-major order, by its index in the tensor."""
        return sum((x - offset) * stride for x, offset, stride in zip(index, self.offsets, self.strides, strict=True))

    def run(self, start: int, stop: int) -> list[Box]:
        """The boxes that the run [start, stop) of this box's row-major order is, in its order.

        Each of them is one run itself: some fixed first indices, a range in the next dim, everything in the dims after.

        **There are at most 2d - 1 of them** (1 for d = 0). A *prefix* [0, stop) of k dims is at most k boxes: for k = 1
        it is a range; else it is whole rows, one box, and a prefix of one more row, at most k - 1 boxes by induction. A
        *suffix* is so too, mirrored. A run within one row is a run of d - 1 dims. Any other is a suffix of its first
        row, whole rows, and a prefix of its last row: at most (d - 1) + 1 + (d - 1) = 2d - 1.

        Raises:
            ValueError: it is no run of this box.
        """
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) is not a run of a box of {self.numel} elements, {self}.")
        return list(self._run((), start, stop)) if start < stop else []

    def _run(self, fixed: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
        # Of the rest of the dims, with the first ones at the indices `fixed`.
        dim = len(fixed)
        if dim == len(self.sizes):
            yield Box(fixed, (1,) * dim)
            return
        row = math.prod(self.sizes[dim + 1 :])
        first, head = divmod(start, row)
        last, tail = divmod(stop, row)
        base = self.offsets[dim]
        if head and first == last:
            yield from self._run((*fixed, base + first), head, tail)
            return
        if head:
            yield from self._run((*fixed, base + first), head, row)
            first += 1
        if first < last:
            yield Box(
                (*fixed, base + first, *self.offsets[dim + 1 :]), ((1,) * dim + (last - first, *self.sizes[dim + 1 :]))
            )
        if tail:
            yield from self._run((*fixed, base + last), 0, tail)

    def in_runs(self, outer: Box, runs: Iterable[tuple[int, int]]) -> list[Box]:
        """What of this box lies in runs [start, stop) of the row-major order of ``outer``, in the order of the runs.

        At most 2d - 1 boxes for each run.
        """
        boxes = (box for start, stop in runs for box in outer.run(start, stop))
        return [common for common in map(self.intersection, boxes) if common is not None]

    def __str__(self) -> str:
        ranges = ", ".join(f"{low}:{high}" for low, high in zip(self.offsets, self.stops, strict=True))
        return f"box [{ranges}]"
