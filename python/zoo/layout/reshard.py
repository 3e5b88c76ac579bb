"""Resharding: which elements go from where to where when a placement changes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zoo.layout.boxes import Box
from zoo.layout.flat import Piece


class Placed(Protocol):
    """A placement of tensors on ranks; a :class:`~zoo.layout.Sharding` is one."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, 0 to num_ranks - 1."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors that ranks hold something of, whole."""

    def pieces_of(self, rank: int) -> Sequence[Piece]:
        """What a rank holds, with offsets into its buffer; none of its pieces overlap."""


@dataclass(frozen=True)
class Held:
    """A placement that is written out: the pieces of each rank. For ranks whose parameters are different boxes."""

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Sequence[Sequence[Piece]]

    @property
    def num_ranks(self) -> int:
        """See :class:`Placed`."""
        return len(self.pieces)

    def pieces_of(self, rank: int) -> Sequence[Piece]:
        """See :class:`Placed`."""
        return self.pieces[rank]


@dataclass(frozen=True, order=True)
class Copy:
    """Copy ``box`` of the tensor ``name`` from ``src_rank``'s buffer to ``dst_rank``'s.

    Element x of the box (counted from its offsets) is at offset + Σ_i x_i strides_i, in either buffer.
    """

    dst_rank: int
    dst_offset: int
    src_rank: int
    src_offset: int
    name: str
    box: Box
    dst_strides: tuple[int, ...]
    src_strides: tuple[int, ...]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(dst offset, src offset, length) of what lies together in both buffers, in the order of the box."""
        # The last dims that lie together on both sides are one run.
        dim, length = len(self.box.sizes), 1
        while dim and self.dst_strides[dim - 1] == self.src_strides[dim - 1] == length:
            dim -= 1
            length *= self.box.sizes[dim]
        starts = [(self.dst_offset, self.src_offset)]
        for size, dst, src in zip(self.box.sizes[:dim], self.dst_strides, self.src_strides, strict=False):
            starts = [(d + x * dst, s + x * src) for d, s in starts for x in range(size)]
        yield from ((d, s, length) for d, s in starts)


def reshard(source: Placed, target: Placed) -> list[Copy]:
    """The copies that fill every buffer of ``target`` from the buffers of ``source``.

    The two may differ in everything but the shapes of the tensors that they share: ranks, order and padding of buffers,
    and which boxes ranks hold. Every element in ``target`` is written exactly once on each rank that holds it. Where
    several source ranks hold an element, the receiving rank itself is preferred, then the replica whose turn it is
    (those that hold the same box take turns by destination rank, so that no source rank serves everyone).

    Raises:
        ValueError: ``target`` needs a tensor that ``source`` does not have, or has with another shape, or elements of
            one that no rank of ``source`` holds.
    """
    for name, shape in target.shapes.items():
        if source.shapes.get(name) != shape:
            raise ValueError(
                f"cannot reshard {name!r}: the target has shape {shape}, the source "
                f"{source.shapes.get(name, 'no such tensor')}."
            )
    index = _Holders(source)
    copies: list[Copy] = []
    for rank in range(target.num_ranks):
        for piece in target.pieces_of(rank):
            copies += index.fill(rank, piece)
    return copies


def runs_of(copies: Iterable[Copy]) -> list[tuple[int, int, int, int, int]]:
    """(dst rank, dst offset, src rank, src offset, length) of all copies, joined where they go on in both buffers."""
    single = sorted((c.dst_rank, dst, c.src_rank, src, length) for c in copies for dst, src, length in c.runs())
    found: list[tuple[int, int, int, int, int]] = []
    for dst_rank, dst, src_rank, src, length in single:
        if found:
            to, at, by, start, before = found[-1]
            if (to, at + before, by, start + before) == (dst_rank, dst, src_rank, src):
                found[-1] = (to, at, by, start, before + length)
                continue
        found.append((dst_rank, dst, src_rank, src, length))
    return found


class Intervals:
    """Which of many intervals [start, stop) meet another one, without looking at all of them.

    Args:
        intervals: in any order; empty ones meet nothing.
    """

    def __init__(self, intervals: Sequence[tuple[int, int]]) -> None:
        self._order = sorted(range(len(intervals)), key=lambda i: intervals[i])
        self._starts = [intervals[i][0] for i in self._order]
        self._stops = [intervals[i][1] for i in self._order]
        # The largest stop so far never falls, so it can be searched.
        self._reach: list[int] = []
        for stop in self._stops:
            self._reach.append(max(stop, self._reach[-1]) if self._reach else stop)

    def meeting(self, start: int, stop: int) -> Iterator[int]:
        """The places, in ``intervals``, of those that share an element with [start, stop), in order of their starts."""
        first = bisect.bisect_right(self._reach, start)
        last = bisect.bisect_left(self._starts, stop)
        return (self._order[i] for i in range(first, last) if self._stops[i] > max(start, self._starts[i]))


class _Holders:
    """Who holds which boxes of each tensor.

    Boxes are found by the numbers of their first and last elements in the whole tensor: where boxes meet, these
    intervals do.
    """

    def __init__(self, source: Placed) -> None:
        holders: dict[str, dict[Box, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for rank in range(source.num_ranks):
            for piece in (p for p in source.pieces_of(rank) if p.box.numel):
                holders[piece.name][piece.box].append((rank, piece.offset))
        self._holders: Mapping[str, list[tuple[Box, list[tuple[int, int]]]]] = {
            name: list(boxes.items()) for name, boxes in holders.items()
        }
        self._whole = {name: Box.whole(shape) for name, shape in source.shapes.items()}
        self._intervals = {
            name: Intervals([self._interval(name, box) for box, _ in boxes]) for name, boxes in self._holders.items()
        }

    def _interval(self, name: str, box: Box) -> tuple[int, int]:
        whole, last = self._whole[name], [stop - 1 for stop in box.stops]
        return whole.number_of(box.offsets), whole.number_of(last) + 1

    def fill(self, dst: int, wanted: Piece) -> Iterator[Copy]:
        """Copies that write each element of a piece of rank ``dst`` once."""
        left = [wanted.box] if wanted.box.numel else []
        for box, (src, offset) in self._candidates(dst, wanted):
            if not left:
                break
            rest = []
            for part in left:
                common = part.intersection(box)
                if common is None:
                    rest.append(part)
                    continue
                yield Copy(
                    dst, wanted.offset + wanted.box.number_of(common.offsets), src,
                    offset + box.number_of(common.offsets), wanted.name, common, wanted.box.strides, box.strides,
                )  # fmt: skip
                rest += part.minus(common)
            left = rest
        if left:
            raise ValueError(
                f"cannot reshard {wanted.name!r}: rank {dst} wants {wanted.box}, of which no rank of the source holds "
                f"{', '.join(map(str, left[:3]))}."
            )

    def _candidates(self, dst: int, wanted: Piece) -> list[tuple[Box, tuple[int, int]]]:
        if wanted.name not in self._holders or not wanted.box.numel:
            return []
        boxes = self._holders[wanted.name]
        found = []
        for i in self._intervals[wanted.name].meeting(*self._interval(wanted.name, wanted.box)):
            box, holders = boxes[i]
            own = [holder for holder in holders if holder[0] == dst]
            found.append((not own, box, own[0] if own else holders[dst % len(holders)]))
        # What the rank has itself comes first.
        found.sort(key=lambda entry: entry[0])
        return [(box, holder) for _, box, holder in found]
