"""Which of a loader's batches a forward has got, where a program fetches batches ahead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Handed:
    """A micro-batch that a loader has handed out."""

    name: str
    """For a sentence: "batch 0 of this rank's share"."""
    before: Any
    """Where the loader stands if this batch, or the step that it belongs to, is the next."""
    counts: Any
    """What it counts for, whatever its part counts."""
    turn: int
    """Which micro-batch of a step it is, where the loader deals whole steps."""
    lengths: tuple[int, ...]
    """Of its tensors."""
    tensors: tuple[weakref.ref[Any], ...]

    def common(self, ids: set[int]) -> int:
        """How many of its tensors are among these."""
        return sum(id(one()) in ids for one in self.tensors if one() is not None)


class Unused:
    """Batches that were handed out and that no forward has had yet, the oldest first.

    A batch is known by its tensors. Where a program has copied them, to a GPU say, batches are taken to be used in the
    order in which they were handed out, and one of another length than that is refused; the very tensors of the latest
    forward are its batch again.

    Args:
        section: which sentences begin with.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self._waiting = deque[Handed]()
        self._current: Handed | None = None
        self._given: tuple[weakref.ref[Any], ...] = ()  # to the forward that had it
        self._begun = False  # an iteration that has not come to its end

    def begin(self) -> None:
        """The loader begins an iteration. What one that was left has handed out does not count any more."""
        if self._begun:
            self.clear()
        self._begun = True

    def end(self) -> None:
        """The loader's iteration is at its end; batches of it may still wait."""
        self._begun = False

    def add(self, tensors: Sequence[Any], *, name: str, before: Any, counts: Any, turn: int = 0) -> None:
        """A batch of these tensors was handed out; the rest as in :class:`Handed`."""
        known = tuple(weakref.ref(tensor) for tensor in tensors)
        lengths = tuple(_length(tensor) for tensor in tensors)
        self._waiting.append(Handed(name, before, counts, turn, lengths, known))

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def clear(self) -> None:
        """The loader stands somewhere else."""
        self._waiting.clear()
        self._current, self._given, self._begun = None, (), False

    @property
    def oldest(self) -> Handed | None:
        """None: all have been used."""
        return self._waiting[0] if self._waiting else None

    @property
    def current(self) -> Handed | None:
        """The latest that was used."""
        return self._current

    def find(self, tensors: Sequence[Any]) -> Handed | None:
        """Which batch a forward has whose arguments have these tensors, or views of them; None: none that was handed
        out, and not used before.

        Raises:
            ValueError: it is a copy, and not of the batch that is next.
        """
        ids = {id(tensor) for given in tensors for tensor in (given, given._base) if tensor is not None}
        ordered = [*([self._current] if self._current is not None else []), *self._waiting]
        best = max(ordered, key=lambda one: one.common(ids), default=None)
        if best is not None and best.common(ids):
            return best
        if any(one() is not None and id(one()) in ids for one in self._given):
            return self._current
        found = self.oldest
        if found is not None and tensors and found.lengths and _length(tensors[0]) not in found.lengths:
            raise ValueError(
                f"{self._section}: a batch has {_length(tensors[0])} samples, and {found.name}, which is next, has "
                f"{found.lengths[0]}; use each batch of engine.dataloader once, whole, in their order."
            )
        return found

    def use(self, found: Handed, tensors: Sequence[Any]) -> None:
        """A forward has this one, as these tensors; those before it are left out for good."""
        while found is not self._current:
            self._current = self._waiting.popleft()
        self._given = tuple(weakref.ref(tensor) for tensor in tensors)


def _length(tensor: Any) -> int:
    return int(tensor.size(0)) if tensor.dim() else 1  # a nested one has no shape
