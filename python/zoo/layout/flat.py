"""Logical tensors and the flat buffers they are laid in."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zoo.layout.boxes import Box

if TYPE_CHECKING:
    from zoo.layout.laid import Part


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """One tensor of the training state: what it is on all ranks together, and what this rank's parameter is of it.

    ``name`` and ``shape`` are global: the same however it is split, with the global index of a layer or an expert.
    ``dtype`` is a name such as "float32"; ``role`` one of "parameter", "gradient", "master", or the name of an
    optimizer's state.

    ``box`` is what of it this rank's parameter is, before any data-parallel sharding: all of it (None), the rows or
    columns of a tensor-parallel rank, or expert e of E, ``Box((e, 0, 0), (1, m, n))`` of shape (E, m, n); or several
    boxes (:class:`~zoo.layout.Boxes`). The parameter has the elements of the part in row-major order; its own shape may
    leave out dims of size 1.

    Raises:
        ValueError: a negative dim, or a box that is not in the tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: str = "parameter"
    box: Part | None = None

    def __post_init__(self) -> None:
        if any(d < 0 for d in self.shape):
            raise ValueError(f"{self.name!r} has shape {self.shape}; every dim must be an integer >= 0.")
        if not self.part.fits(self.shape):
            raise ValueError(f"{self.name!r} has shape {self.shape}, in which there is no {self.part}.")

    @property
    def part(self) -> Part:
        """``box``, or all of the tensor."""
        return Box.whole(self.shape) if self.box is None else self.box

    @property
    def numel(self) -> int:
        """Number of elements that are here: those of the box (1 for a scalar)."""
        return math.prod(self.shape if self.box is None else self.box.sizes)


@dataclass(frozen=True, order=True)
class Slice:
    """Elements [start, start + length) of the parameter ``name``, found at ``offset`` in some buffer.

    They count in the row-major order of this rank's parameter: of the whole tensor, or of its box.
    """

    name: str
    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        """One past the last element, in the parameter."""
        return self.start + self.length


@dataclass(frozen=True, order=True)
class Piece:
    """The elements of ``box`` of the tensor ``name``, in the box's row-major order from ``offset`` in some buffer.

    What a shard holds of a tensor, in words that every rank understands: the box is in the whole tensor.
    """

    name: str
    box: Box
    offset: int

    @property
    def stop(self) -> int:
        """One past the last element, in the buffer."""
        return self.offset + self.box.numel


@dataclass(frozen=True)
class FlatLayout:
    """Logical tensors in one flat buffer of ``size`` elements.

    ``offsets[i]`` is where tensor i starts, a multiple of the alignment it was built with; gaps and the tail are
    padding and belong to no tensor.
    """

    tensors: tuple[LogicalTensor, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def pack(cls, tensors: Iterable[LogicalTensor], *, align: int = 1, multiple: int = 1) -> FlatLayout:
        """Lay tensors one after the other.

        Args:
            align: every tensor starts at a multiple of this many elements.
            multiple: the total size is rounded up to a multiple of this (N times the alignment of a shard).
        """
        if align < 1 or multiple < 1:
            raise ValueError(f"FlatLayout.pack got align={align}, multiple={multiple}; both must be >= 1.")
        kept = tuple(tensors)
        names = [t.name for t in kept]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ValueError(f"FlatLayout.pack got these names more than once: {', '.join(twice)}.")
        offsets: list[int] = []
        end = 0
        for tensor in kept:
            start = round_up(end, align)
            offsets.append(start)
            end = start + tensor.numel
        return cls(kept, tuple(offsets), round_up(end, multiple))

    def shard_range(self, index: int, count: int) -> tuple[int, int]:
        """[start, stop) of shard ``index`` when the buffer is cut into ``count`` equal parts."""
        if count < 1 or self.size % count:
            raise ValueError(
                f"a flat buffer of {self.size} elements does not split into {count} equal shards; "
                f"pack it with multiple={max(count, 1)} (or a multiple of that)."
            )
        if not 0 <= index < count:
            raise ValueError(f"shard index {index} is outside 0..{count - 1}.")
        length = self.size // count
        return index * length, (index + 1) * length

    def slices(self, start: int = 0, stop: int | None = None) -> list[Slice]:
        """The runs of parameters inside [start, stop) of the buffer; ``Slice.offset`` counts from ``start``."""
        return [found for _, found in self._slices(start, self.size if stop is None else stop)]

    def pieces(self, start: int = 0, stop: int | None = None) -> list[Piece]:
        """The same in boxes of the whole tensors: at most 2d - 1 for each of d dims."""
        found = []
        for tensor, run in self._slices(start, self.size if stop is None else stop):
            offset = run.offset
            for box in tensor.part.run(run.start, run.stop):
                found.append(Piece(tensor.name, box, offset))
                offset += box.numel
        return found

    def _slices(self, start: int, stop: int) -> Iterator[tuple[LogicalTensor, Slice]]:
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"[{start}, {stop}) is not a range inside a flat buffer of {self.size} elements.")
        first = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        for tensor, offset in zip(self.tensors[first:], self.offsets[first:], strict=True):
            if offset >= stop:
                break
            low, high = max(offset, start), min(offset + tensor.numel, stop)
            if low < high:
                yield tensor, Slice(tensor.name, low - offset, high - low, low - start)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple
