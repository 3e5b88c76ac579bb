"""One order of operations for each rank on a communicator, as nccl has it: in the order of their issue."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zoo.sim.calls import Call
    from zoo.sim.matching import CallMatch

__all__ = ["Entry", "Orders"]


class Entry:
    """What a rank issued as one operation: a call, or a batch of them, which is ``open`` until its end."""

    __slots__ = ("calls", "open")

    def __init__(self, *, open: bool) -> None:
        self.calls: list[Call] = []
        self.open = open


class Orders:
    """The queues of the members of a group. A match may complete when each of its calls is at the head of its queue."""

    def __init__(self, size: int) -> None:
        self._queues: list[deque[Entry]] = [deque() for _ in range(size)]
        self._formed: list[CallMatch] = []

    def add(self, call: Call, entry: Entry | None) -> None:
        """A call of its own, or of the batch ``entry``, joins the end of its rank's queue."""
        queue = self._queues[call.group_rank]
        if entry is None:
            entry = Entry(open=False)
        if not entry.calls:
            queue.append(entry)
        entry.calls.append(call)
        call.entry = entry

    def formed(self, match: CallMatch) -> None:
        """All sides of ``match`` are there; it waits for its turn."""
        self._formed.append(match)

    def turn(self) -> list[CallMatch]:
        """Forget what is complete; the matches whose turn has come, each of them once."""
        for queue in self._queues:
            while queue and not queue[0].open and all(call.done for call in queue[0].calls):
                queue.popleft()
        found = [m for m in self._formed if all(self._first(call) is call.entry for call in m.calls)]
        self._formed = [m for m in self._formed if m not in found]
        return found

    def drop(self, call: Call) -> None:
        """``call`` has failed: no match of it will complete."""
        self._formed = [match for match in self._formed if call not in match.calls]

    def in_the_way(self, call: Call) -> Call | None:
        """Of a call whose sides are all there: the operation of one of them that has to be complete before."""
        for match in self._formed:
            if call in match.calls:
                for other in match.calls:
                    first = self._queues[other.group_rank][0]
                    if first is not other.entry:
                        return next(earlier for earlier in first.calls if not earlier.done)
        return None

    def _first(self, call: Call) -> Entry | None:
        queue = self._queues[call.group_rank]
        return queue[0] if queue and not queue[0].open else None
