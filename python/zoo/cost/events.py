"""Time as discrete events: ranks that compute, begin communication and wait for it.

A *program* is what one rank does, in order. It says nothing of time: that comes from what a communication costs and
from who is late. So one program can be asked again with other costs: a faster link, a slow rank.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from zoo.cost.collectives import seconds
from zoo.cost.hardware import Hardware

__all__ = ["Compute", "EventError", "Program", "Span", "Start", "Timeline", "Wait", "cost_on", "simulate_events"]


class EventError(ValueError):
    """Programs that cannot be run to their end."""


class Compute(NamedTuple):
    """So many seconds of this rank alone."""

    seconds: float
    name: str = ""


class Start(NamedTuple):
    """A rank's part of a communication begins; the rank goes on.

    Attributes:
        key: of the communication, the same on all members. members: ranks of the simulation that take part.
        stream: communications of one stream and member go one after the other, in the order of their starts.
        op, num_bytes: what it is. name: what it is for.
    """

    key: Any
    members: tuple[int, ...]
    stream: Any
    op: str
    num_bytes: float = 0.0
    name: str = ""


class Wait(NamedTuple):
    """The rank goes on when communications that it began are over."""

    keys: tuple[Any, ...]


Program = Sequence[Compute | Start | Wait]


class Span(NamedTuple):
    """Something on a rank, from when to when. ``stream`` is "" for computation, "wait" for waiting, else the stream's
    name."""

    rank: int
    stream: str
    name: str
    start_s: float
    end_s: float


def _in_time(span: Span) -> tuple[float, float, str, str]:
    return span.start_s, span.end_s, span.stream, span.name


_NEVER: tuple[float, Any] = (0.0, None)


@dataclass(slots=True)
class _Communication:
    first: Start
    posted: dict[int, float] = field(default_factory=dict)
    begin_s: float = math.nan
    end_s: float = math.nan
    decided_by: int = -1  # the member that came last, or whose stream was busy the longest


@dataclass(kw_only=True)
class Timeline:
    """What comes of programs.

    Attributes:
        ends_s: when each rank is through. computed: by rank, (from, to, name) of each computation.
        exposed_s: by rank, seconds of waiting by what was waited for. wire_s: by rank, those of them in which something
            that is waited for is under way; in the others it has not begun, because somebody is late.
        ranks: which rank is at each place of these.
    """

    ends_s: tuple[float, ...]
    computed: tuple[Sequence[tuple[float, float, str]], ...]
    exposed_s: tuple[Mapping[str, float], ...]
    wire_s: tuple[float, ...]
    ranks: tuple[int, ...] = ()
    _waits: tuple[Sequence[Span], ...] = ()
    _communications: Sequence[_Communication] = ()
    _critical: Sequence[Span] = ()

    @property
    def makespan_s(self) -> float:
        """Until the last rank is through."""
        return max(self.ends_s, default=0.0)

    @property
    def waited_s(self) -> tuple[float, ...]:
        """Seconds in which each rank waits."""
        return tuple(math.fsum(found.values()) for found in self.exposed_s)

    def critical_path(self) -> tuple[Span, ...]:
        """Computations and communications, one after the other, that the last rank's end follows from."""
        return tuple(self._critical)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Computations, waits and communications, by rank and time; those of one time by stream and name."""
        found: list[list[Span]] = [list(waits) for waits in self._waits]
        place = {rank: at for at, rank in enumerate(self.ranks)}
        for rank, computed in zip(self.ranks, self.computed, strict=True):
            found[place[rank]] += [Span(rank, "", name, start, end) for start, end, name in computed]
        for one in self._communications:
            first = one.first
            for m in (m for m in first.members if m in place):
                found[place[m]].append(Span(m, str(first.stream), first.name or first.op, one.begin_s, one.end_s))
        return tuple(span for of_rank in found for span in sorted(of_rank, key=_in_time))

    def waits(self, rank: int) -> tuple[Span, ...]:
        """Of one rank, by time; each has the name of what was waited for."""
        return tuple(self._waits[self.ranks.index(rank)])

    def critical_s(self) -> dict[str, float]:
        """Seconds of the critical path by name."""
        found: dict[str, float] = {}
        for span in self._critical:
            found[span.name] = found.get(span.name, 0.0) + span.end_s - span.start_s
        return found

    def to_chrome(self) -> dict[str, Any]:
        """A trace that chrome://tracing and Perfetto show: a process for each rank, a thread for each stream."""
        events = []
        for span in self.spans:
            events.append(
                {
                    "name": span.name or span.stream or "compute", "ph": "X", "pid": span.rank,
                    "tid": span.stream or "compute", "ts": 1e6 * span.start_s, "dur": 1e6 * (span.end_s - span.start_s),
                }
            )  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def simulate_events(
    programs: Sequence[Program], cost: Callable[[Start], float], *, slower: Mapping[int, float] | None = None,
    ranks: Sequence[int] | None = None,
) -> Timeline:  # fmt: skip
    """Run programs.

    A communication begins when all of its members have begun it and what each of them has on its stream before it is
    over, and takes ``cost`` seconds. A wait ends with it.

    Args:
        programs: of each rank. cost: of a communication, from its first start. slower: factors of a rank's seconds.
        ranks: which rank each program is of, where there is one for each role only: a member of a communication that
            has no program comes with those that have one. That is exact where ranks of a role do the same, and their
            communications cost the same. What comes out is by rank where it says so, else in this order.

    Raises:
        EventError: two programs of one rank, a factor of a rank that has no program; ranks that wait for ever, a wait
            for what the rank did not begin, members that begin something twice or that differ in what it is; seconds
            below 0.
    """
    machine = _Machine(programs, cost, slower or {}, ranks)
    machine.run()
    return machine.timeline()


def cost_on(hardware: Hardware) -> Callable[[Start], float]:
    """What communications of ranks cost that fill the nodes of a machine in their order.

    ``num_bytes`` of a start is what one rank gives, as the simulator of :mod:`zoo.sim` records it: of a gather or a
    scatter a part, of all to all what the rank gives or gets that does so the most.
    """

    @functools.lru_cache(maxsize=4096)
    def spread(members: tuple[int, ...]) -> tuple[int, int]:
        nodes = Counter(member // hardware.ranks_per_node for member in members)
        return len(nodes), max(nodes.values())

    def cost(start: Start) -> float:
        size = len(start.members)
        num_nodes, local = spread(start.members)
        op = _NAMES.get(start.op, start.op)
        if op in ("send", "recv"):
            link = hardware.inside if num_nodes == 1 else hardware.between
            return link.latency_s + start.num_bytes / link.bytes_per_s
        num_bytes = start.num_bytes * (size if op == "all_gather" else 1)  # so it is of a scatter, whose root gives all
        return seconds("all_reduce" if op == "barrier" else op, max(num_bytes, 1), size, hardware, local=local)

    return cost


_NAMES = {
    "all_gather_into_tensor": "all_gather", "all_gather_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_reduce_coalesced": "all_reduce",
    "all_to_all_single": "all_to_all", "monitored_barrier": "barrier", "reduce": "broadcast", "gather": "all_gather",
    "gather_into_tensor": "all_gather", "scatter": "all_gather",
}  # fmt: skip


class _Machine:
    def __init__(
        self, programs: Sequence[Program], cost: Callable[[Start], float], slower: Mapping[int, float],
        ranks: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.programs, self.cost, self.some = programs, cost, ranks is not None
        # Everything below is by place in ``programs``; this says which rank has which.
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(len(programs)))
        self.place = {rank: at for at, rank in enumerate(self.ranks)}
        if not len(self.place) == len(self.ranks) == len(programs):
            raise EventError(f"there are {len(programs)} programs, and they are of the ranks {list(self.ranks)[:9]}.")
        if absent := sorted(slower.keys() - self.place.keys()):
            raise EventError(
                f"slower has a factor of rank {absent[0]}, which has no program: those are of {list(self.ranks)[:9]}."
            )
        self.slower = {self.place[rank]: factor for rank, factor in slower.items()}
        self.places: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.now = [0.0] * len(programs)
        self.at = [0] * len(programs)
        self.known: dict[Any, _Communication] = {}
        self.queues: dict[tuple[int, Any], deque[Any]] = {}  # keys on a stream of a rank that are not over
        self.free: dict[tuple[int, Any], tuple[float, Any]] = {}  # when it is free, and after which key
        self.waiting: dict[Any, list[int]] = {}
        self.computed: list[list[tuple[float, float, str]]] = [[] for _ in programs]
        self.waits: list[list[Span]] = [[] for _ in programs]
        self.exposed: list[dict[str, float]] = [{} for _ in programs]
        self.wire: list[list[float]] = [[] for _ in programs]
        # What passed a rank's time: from, to, name of a computation, key of a wait.
        self.causes: list[list[tuple[float, float, str, Any]]] = [[] for _ in programs]
        self.queued: dict[Any, Any] = {}  # of a key that waited for its stream: the key before it

    def run(self) -> None:
        ready = deque(range(len(self.programs)))
        while ready:
            rank = ready.popleft()
            self._advance(rank, ready)
        stuck = [rank for rank, program in enumerate(self.programs) if self.at[rank] < len(program)]
        if stuck:
            item = self.programs[stuck[0]][self.at[stuck[0]]]
            absent = ""
            if isinstance(item, Wait):
                found = next(f for f in map(self.known.__getitem__, item.keys) if math.isnan(f.end_s))
                posted = {self.ranks[at] for at in found.posted}
                missing = [m for m in found.first.members if m not in posted and (m in self.place or not self.some)]
                absent = f": {found.first.op} {found.first.key!r} is not begun by {missing or 'those before it'}"
            ranks = [self.ranks[at] for at in stuck[:9]]
            raise EventError(f"ranks {ranks} wait for ever; rank {ranks[0]} at number {self.at[stuck[0]]}{absent}.")

    def _present(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """The places of the members that have programs; of all where every rank has one, so that others are missed."""
        if not self.some:
            return members
        found = self.places.get(members)
        if found is None:
            found = self.places[members] = tuple(self.place[m] for m in members if m in self.place)
        return found

    def _advance(self, rank: int, ready: deque[int]) -> None:
        program = self.programs[rank]
        while self.at[rank] < len(program):
            item = program[self.at[rank]]
            if isinstance(item, Compute):
                self._compute(rank, item)
            elif isinstance(item, Start):
                self._start(rank, item, ready)
            elif not self._wait(rank, item):
                return
            self.at[rank] += 1

    def _compute(self, rank: int, item: Compute) -> None:
        if not 0 <= item.seconds < math.inf:
            raise EventError(f"rank {self.ranks[rank]} computes for {item.seconds} s; it is a number of at least 0.")
        end = self.now[rank] + item.seconds * self.slower.get(rank, 1.0)
        now = self.now[rank]
        self.computed[rank].append((now, end, item.name))
        self.causes[rank].append((now, end, item.name, None))
        self.now[rank] = end

    def _start(self, rank: int, item: Start, ready: deque[int]) -> None:
        found = self.known.get(item.key)
        if found is None:
            found = self.known[item.key] = _Communication(item)
        first = found.first
        same = item.members is first.members or item.members == first.members  # tuples compare every member
        if item.op != first.op or not same or item.stream != first.stream:
            raise EventError(f"rank {self.ranks[rank]} begins {item.key!r} as {item}, another one as {first}.")
        present = self._present(item.members)
        if rank in found.posted or rank not in present:
            raise EventError(
                f"rank {self.ranks[rank]} begins {item.key!r} twice, or is none of its members {item.members}."
            )
        found.posted[rank] = self.now[rank]
        self.queues.setdefault((rank, item.stream), deque()).append(item.key)
        if len(found.posted) == len(present):
            self._begin(item.key, ready)

    def _begin(self, key: Any, ready: deque[int]) -> None:
        """Give a communication its time if all have come and it is the first on all streams; then those after it."""
        waiting = [key]
        while waiting:
            key = waiting.pop()
            found = self.known[key]
            members, stream = self._present(found.first.members), found.first.stream
            if len(found.posted) < len(members) or any(self.queues[m, stream][0] != key for m in members):
                continue
            last, begin, after = -1, -1.0, None
            for m, posted in found.posted.items():
                free, before = self.free.get((m, stream), _NEVER)
                when = free if free > posted else posted
                if when > begin or (when == begin and m < last):
                    last, begin, after = m, when, before if free > posted else None
            cost = self.cost(found.first)
            if not 0 <= cost < math.inf:
                raise EventError(f"{found.first.op} {key!r} costs {cost} s; a cost is a number of at least 0.")
            found.begin_s, found.end_s, found.decided_by = begin, begin + cost, last
            self.queued[key] = after
            for m in members:
                self.free[m, stream] = found.end_s, key
                queue = self.queues[m, stream]
                queue.popleft()
                if queue:
                    waiting.append(queue[0])
            ready.extend(self.waiting.pop(key, ()))

    def _wait(self, rank: int, item: Wait) -> bool:
        awaited = []
        for key in item.keys:
            found = self.known.get(key)
            if found is None or rank not in found.posted:
                raise EventError(f"rank {self.ranks[rank]} waits for {key!r}, which it did not begin.")
            if math.isnan(found.end_s):
                self.waiting.setdefault(key, []).append(rank)
                return False
            awaited.append((found.begin_s, found.end_s, key))
        now, end = self.now[rank], max((end for _, end, _ in awaited), default=0.0)
        if end <= now:
            return True
        covered = now
        for begin, over, _ in sorted(awaited, key=lambda one: one[:2]):
            if over > covered:
                self.wire[rank].append(over - max(begin, covered))
                covered = over
        last = next(key for _, over, key in awaited if over == end)
        first = self.known[last].first
        name = first.name or first.op
        self.waits[rank].append(Span(self.ranks[rank], "wait", name, now, end))
        self.causes[rank].append((now, end, name, last))
        self.exposed[rank][name] = self.exposed[rank].get(name, 0.0) + end - now
        self.now[rank] = end
        return True

    def timeline(self) -> Timeline:
        return Timeline(
            ends_s=tuple(self.now), computed=tuple(self.computed), exposed_s=tuple(self.exposed),
            wire_s=tuple(map(math.fsum, self.wire)), ranks=self.ranks, _waits=tuple(self.waits), _critical=self._path(),
            _communications=[one for one in self.known.values() if not math.isnan(one.end_s)],
        )  # fmt: skip

    def _path(self) -> tuple[Span, ...]:
        """From the end of the last rank backwards: what it computed, and what it waited for, there."""
        if not self.now:
            return ()
        rank = max(range(len(self.now)), key=lambda r: self.now[r])
        at, found = self.now[rank], list[Span]()
        places = [len(causes) for causes in self.causes]
        while True:
            causes, place = self.causes[rank], places[rank]
            while place and causes[place - 1][1] > at:
                place -= 1
            places[rank] = place - 1
            if place == 0:
                break
            start, end, name, key = causes[place - 1]
            if key is None:
                found.append(Span(self.ranks[rank], "", name, start, end))
                at = start
                continue
            while key is not None:  # a communication, and those before it on the stream that held it up
                one = self.known[key]
                found.append(
                    Span(
                        self.ranks[one.decided_by],
                        str(one.first.stream),
                        one.first.name or one.first.op,
                        one.begin_s,
                        one.end_s,
                    )
                )
                rank, at = one.decided_by, one.begin_s
                key = self.queued[key]
        return tuple(reversed(found))
