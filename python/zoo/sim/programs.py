"""What the ranks of a run compute, begin and wait for, in the order of each: what :mod:`zoo.cost` gives its time.

The run itself has no time. Its programs are asked afterwards, again and again: on this machine, on that link, with one
rank that is slow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zoo.cost.events import Compute, Program, Start, Wait
from zoo.sim.world import place

if TYPE_CHECKING:
    from zoo.sim.calls import Call

__all__ = ["Programs", "compute"]


class Programs:
    """Given to ``run(..., programs=...)``, which fills it.

    Args:
        measured: the time in which a rank runs between two communications is what it computes. Without, only what
            :func:`compute` and :func:`zoo.profiling.costing` say.
        scale: factor of measured seconds.
    """

    def __init__(self, *, measured: bool = False, scale: float = 1.0) -> None:
        self._measured, self._scale = measured, scale
        self._items: dict[int, list[Any]] = {}
        self._since: float | None = None
        self._matches = 0

    def programs(self) -> list[Program]:
        """Of each rank that ran, in order. A communication that did not happen in the run is left out."""
        found: list[Program] = []
        for items in self._items.values():
            found.append([i if isinstance(i, Compute) else i.item() for i in items if _happened(i)])
        return found

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran: all of them, or one for each role."""
        return tuple(self._items)

    # -- called by the run --------------------------------------------------------------------------------------------

    def begin(self, ranks: Sequence[int]) -> None:
        """A run of these ranks begins."""
        self._items = {rank: [] for rank in ranks}

    def resume(self) -> None:
        """A rank has the baton."""
        self._since = time.perf_counter()

    def pause(self, rank: int) -> None:
        """It communicates, or gives the baton away."""
        if self._measured and self._since is not None:
            self.compute(rank, self._scale * (time.perf_counter() - self._since), "")
        self._since = time.perf_counter()

    def compute(self, rank: int, seconds: float, name: str) -> None:
        """A rank computes; what has one name in a row is one."""
        items = self._items[rank]
        if items and isinstance(items[-1], Compute) and items[-1].name == name:
            items[-1] = Compute(items[-1].seconds + seconds, name)
        else:
            items.append(Compute(seconds, name))

    def started(self, call: Call) -> None:
        """A rank has issued a call."""
        self._items[call.rank].append(_Started(call))

    def waited(self, rank: int, call: Call) -> None:
        """It goes on only after the call."""
        self._items[rank].append(_Waited(call))

    def matched(self, calls: list[Call]) -> None:
        """These are one communication."""
        number, self._matches = self._matches, self._matches + 1
        first = calls[0]
        members = first.group.members if first.op != "send" else tuple(sorted({call.rank for call in calls}))
        stream = first.group.name
        if first.op == "send":  # messages of a pair, a direction and a tag keep their order
            stream += f": {first.rank} to {calls[1].rank}" + (f", tag {first.tag}" if first.tag else "")
        num_bytes = max(map(_num_bytes, calls))
        for call in calls:
            call.told.start = Start(number, members, stream, first.op, num_bytes, first.op)


def _num_bytes(call: Call) -> int:
    """What a rank gives, or of all to all gets, where that is more: all may send to one."""
    got = call.outputs if call.op.startswith("all_to_all") else []
    return max(call.num_bytes(), sum(tensor.numel() * tensor.element_size() for tensor in got))


class Told:
    """What is known of a call when the run is over, without its tensors."""

    __slots__ = ("start",)

    def __init__(self) -> None:
        self.start: Start | None = None


class _Started:
    __slots__ = ("told",)

    def __init__(self, call: Call) -> None:
        self.told = call.told

    def item(self) -> Start | Wait:
        return self._start()

    def _start(self) -> Start:
        if self.told.start is None:
            raise ValueError("a communication of this run never happened.")
        return self.told.start


class _Waited(_Started):
    __slots__ = ()

    def item(self) -> Start | Wait:
        return Wait((self._start().key,))


def _happened(item: Any) -> bool:
    return isinstance(item, Compute) or item.told.start is not None


def compute(seconds: float, name: str = "") -> None:
    """This simulated rank computes for so long. Outside of a run with programs it does nothing."""
    where = place()
    programs = where.scheduler.programs if where is not None else None
    if where is not None and programs is not None:
        programs.compute(where.rank.index, seconds, name)
