"""What a run did: one event for each operation that a rank issued."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Trace"]


@dataclass(frozen=True)
class Event:
    """One operation, at the moment when one rank issued it.

    ``step`` is the scheduling step (equal steps mean that nothing was scheduled in between), ``rank`` the global rank,
    ``op`` the name as in ``torch.distributed``, ``group`` the global ranks of the group in group order. ``shape`` is
    the shape of the tensor this rank gives (for recv, and for scatter: gets), a tuple of shapes where the operation
    takes a list, ``()`` for a barrier. ``dtype`` is like ``"float32"``, or ``""``. ``num_bytes`` is the size of those
    tensors. ``peer`` is the root, or the other side of a send or recv, as a global rank; None where there is none.
    """

    step: int
    rank: int
    op: str
    group: tuple[int, ...]
    shape: tuple[Any, ...]
    dtype: str
    num_bytes: int
    peer: int | None = None

    def what(self) -> tuple[Any, ...]:
        """The event without its step and rank: equal for all ranks of a group when they make the same collective."""
        return (self.op, self.group, self.shape, self.dtype, self.num_bytes, self.peer)


@dataclass
class Trace:
    """The events of a run, in the order in which they happened. Two runs with one seed have equal traces."""

    events: list[Event] = field(default_factory=list)

    def append(self, event: Event) -> None:
        """Called by the run for each operation."""
        self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def of_rank(self, rank: int) -> list[Event]:
        """The operations of one rank in its program order."""
        return [event for event in self.events if event.rank == rank]

    def order(self, rank: int, group: tuple[int, ...]) -> list[tuple[Any, ...]]:
        """What ``rank`` did on the group of these global ranks, in order, without steps: comparable between ranks."""
        return [event.what() for event in self.events if event.rank == rank and event.group == tuple(group)]
