"""A part of the training state: what checkpoints write, and what access, norms and moves walk over.

No torch is imported here: tensors are handed through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from zoo.layout.boxes import Box


class Lent(Protocol):
    """Bytes that stay as they are until they are released. For any thread."""

    def read(self, memory: torch.Tensor, offset: int) -> None:
        """Fill ``memory``, bytes, from byte ``offset`` on."""

    def release(self) -> None:
        """They are not needed any more."""


@dataclass(frozen=True)
class Stored:
    """``length`` elements that are not in memory, or not as they are: from ``start`` of what ``load`` reads.

    Attributes:
        load: ``load(start, length)`` reads elements, a flat tensor of ``dtype``.
        lend: lends their bytes from a byte on, as they are now; None where they lie otherwise than they are read.
        in_memory: what ``load`` reads from is.
        lent: they are lent already, from their first byte on.
    """

    load: Callable[[int, int], torch.Tensor]
    dtype: torch.dtype
    start: int = 0
    length: int = -1
    lend: Callable[[int], Lent] | None = None
    in_memory: bool = False
    lent: Lent | None = None

    def __getitem__(self, part: slice) -> Stored:
        """A part of it, still unread."""
        return replace(self, start=self.start + part.start, length=part.stop - part.start)

    def read(self) -> torch.Tensor:
        """The elements."""
        return self.load(self.start, self.length)

    def borrow(self) -> Lent | None:
        """Their bytes, for another thread; None where they cannot be lent."""
        return None if self.lend is None else self.lend(self.start * self.dtype.itemsize)


@dataclass(frozen=True)
class StateSlice:
    """Elements [start, start + length) of the logical tensor ``name`` of ``shape``, in its row-major order.

    Attributes:
        role: "parameter" (the fp32 value, or a frozen parameter in its own dtype), "buffer", or the name of an
            optimizer's state.
        source: (length,) a flat view of the live state, or what reads it. Copy it before training goes on.
        box: the elements are those of this box of the tensor, in the box's row-major order; ``start`` is the number of
            the first one. None: a run.
        constant: not expected to change from one checkpoint to the next.
    """

    name: str
    role: str
    start: int
    length: int
    shape: tuple[int, ...]
    source: torch.Tensor | Stored
    box: Box | None = None
    constant: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """(length,) the elements; what is not in memory is read now, and is a copy."""
        return self.source.read() if isinstance(self.source, Stored) else self.source

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements; nothing is read."""
        return self.source.dtype

    @property
    def is_kept_out(self) -> bool:
        """It is not in memory, and cannot be borrowed either."""
        return isinstance(self.source, Stored) and self.source.lend is None and not self.source.in_memory

    @property
    def lent(self) -> Lent | None:
        """What it is read from, where that is lent already."""
        return self.source.lent if isinstance(self.source, Stored) else None

    def borrow(self) -> Lent | None:
        """What is not in memory, for another thread to read: nothing overwrites it until it is released. None where it
        is in memory, or cannot be lent."""
        return self.source.borrow() if isinstance(self.source, Stored) else None
