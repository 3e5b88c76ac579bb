"""Logical tensors and the flat buffers they are laid in."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """One tensor of the training state, whole: not where it is, only what it is.

    ``dtype`` is a name such as "float32"; ``role`` one of "parameter", "gradient", "master", or the name of an
    optimizer's state. The number of elements is the product of ``shape`` (1 for a scalar, 0 if any dim is 0).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    role: str = "parameter"

    def __post_init__(self) -> None:
        if any(d < 0 for d in self.shape):
            raise ValueError(f"{self.name!r} has shape {self.shape}; every dim must be an integer >= 0.")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, order=True)
class Slice:
    """Elements [start, start + length) of the row-major logical tensor ``name``, found at ``offset`` in some buffer."""

    name: str
    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        """One past the last element, in the logical tensor."""
        return self.start + self.length


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

    @cached_property
    def _index(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.tensors)}

    def offset_of(self, name: str) -> int:
        """Where the tensor called ``name`` starts."""
        if name not in self._index:
            raise KeyError(f"no tensor {name!r} in this layout; it holds {', '.join(self._index) or 'nothing'}")
        return self.offsets[self._index[name]]

    @property
    def numel(self) -> int:
        """Elements that belong to a tensor: the size less the padding."""
        return sum(t.numel for t in self.tensors)

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
        """The pieces of logical tensors inside [start, stop) of the buffer; ``Slice.offset`` counts from ``start``."""
        stop = self.size if stop is None else stop
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"[{start}, {stop}) is not a range inside a flat buffer of {self.size} elements.")
        found = []
        first = max(bisect.bisect_right(self.offsets, start) - 1, 0)
        for tensor, offset in zip(self.tensors[first:], self.offsets[first:], strict=True):
            if offset >= stop:
                break
            low, high = max(offset, start), min(offset + tensor.numel, stop)
            if low < high:
                found.append(Slice(tensor.name, low - offset, high - low, low - start))
        return found


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple
