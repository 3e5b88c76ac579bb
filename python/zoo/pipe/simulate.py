"""When will each computation run? A simulation of the programs of a table from costs of computations and transfers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from zoo.pipe.lowering import Program, Step, Transfer, lower, message_of
from zoo.pipe.schedules.placing import needs
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table

__all__ = ["Costs", "Simulation", "Span", "read_spans", "simulate", "write_spans"]

PerStage = float | Sequence[float]
Channel = tuple[int, int]
_BY_STAGE = ("forward_s", "input_s", "weight_s", "backward_s", "activation_bytes", "kept_bytes")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a micro-batch costs in each stage: one number for all stages, or one for each.

    Attributes:
        forward_s: F.
        input_s: I.
        weight_s: W.
        backward_s: B; None: I + W.
        activation_bytes: of the message from a stage to the next one, and of the gradient that comes back for it.
        latency_s: of every message.
        bytes_per_s: of a channel (from one rank to another); messages of a channel go one after the other.
        overlapped: whether ranks compute while messages are under way. If not, a rank stays at the boundary of a slot
            until all of its transfers there are through.
        receives_ahead: whether receives are posted before the messages come (a ring of buffers, a transport that keeps
            what comes), so that a message goes when its sender has come to it. If not, or without ``overlapped``, it
            goes when both sides have come to the boundary after its slot.
        kept_bytes: what F keeps for the backward of a stage.
        freed_by_input: the part of it that I frees; W frees the rest, B all of it.
    """

    forward_s: PerStage = 1.0
    input_s: PerStage = 1.0
    weight_s: PerStage = 1.0
    backward_s: PerStage | None = None
    activation_bytes: PerStage = 0.0
    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    overlapped: bool = True
    receives_ahead: bool = True
    kept_bytes: PerStage = 1.0
    freed_by_input: float = 0.0

    def __post_init__(self) -> None:
        for name in (*_BY_STAGE, "latency_s"):
            given = getattr(self, name)
            numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
            if given is None and name == "backward_s":
                continue
            if not all(isinstance(n, SupportsFloat) and 0 <= float(n) < math.inf for n in numbers):
                raise ValueError(f"costs got {name}={given}; a cost is a finite number of 0 or more.")
        if not 0 <= self.freed_by_input <= 1 or not self.bytes_per_s > 0:
            raise ValueError(
                f"costs got freed_by_input={self.freed_by_input} and bytes_per_s={self.bytes_per_s}; the first is a "
                "part, at most 1, and the second is more than 0."
            )

    def seconds(self, c: Computation) -> float:
        """Of a computation."""
        if c.kind is Kind.BACKWARD and self.backward_s is None:
            return _of(self.input_s, c.stage) + _of(self.weight_s, c.stage)
        costs = {
            Kind.FORWARD: self.forward_s, Kind.BACKWARD: self.backward_s, Kind.INPUT: self.input_s,
            Kind.WEIGHT: self.weight_s,
        }  # fmt: skip
        found = costs[c.kind]
        return _of(0.0 if found is None else found, c.stage)

    def transfer_s(self, t: Transfer) -> float:
        """Of a message: latency + bytes / bandwidth. The gradient for stage s is as large as what stage s sent."""
        sender = t.stage if t.what == "activation" else t.stage - 1
        return self.latency_s + _of(self.activation_bytes, sender) / self.bytes_per_s

    def check(self, num_stages: int) -> None:
        """Raise ValueError where there are numbers for another number of stages."""
        for name in _BY_STAGE:
            given = getattr(self, name)
            if isinstance(given, Sequence) and len(given) != num_stages:
                raise ValueError(f"costs have {len(given)} numbers for {name}; the schedule has {num_stages} stages.")


def _of(value: PerStage, stage: int) -> float:
    return float(value[stage] if isinstance(value, Sequence) else value)


@dataclass(frozen=True)
class Span:
    """A computation on a rank, from when to when."""

    rank: int
    computation: Computation
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What comes of a table under costs.

    Attributes:
        table: what was simulated.
        spans: all computations, by rank and time.
        makespan_s: until the last rank is through.
        bubble: 1 - Σ busy / (ranks · makespan).
        exposed_s: by rank, the time in which it computes nothing and a transfer that it waits for is under way.
        peak_bytes: by rank, the most that is kept for backwards; with the default costs, micro-batches · stages.
    """

    table: Table
    spans: tuple[Span, ...]
    makespan_s: float
    exposed_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    busy_s: tuple[float, ...] = field(default=())

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they compute nothing."""
        whole = self.table.num_ranks * self.makespan_s
        return 1.0 - math.fsum(self.busy_s) / whole if whole > 0 else 0.0


def simulate(table: Table, costs: Costs | None = None, *, programs: Sequence[Program] | None = None) -> Simulation:
    """Run the programs of a table with costs in the place of work.

    A rank runs its steps in order. A computation begins when the one before it is done and what it received is there.
    A transfer begins when both sides have come to the step that it is in and the one before it on its channel is
    through; with ``costs.overlapped`` neither side waits for its end before it needs what was sent.

    Args:
        table: a schedule.
        costs: 1 for each of F, I and W, nothing for transfers, by default.
        programs: those to run; the table's own by default.

    Raises:
        ValueError: costs for another number of stages.
        ScheduleError: ranks that wait for each other.
    """
    costs = costs if costs is not None else Costs()
    costs.check(table.num_stages)
    machine = _Machine(table, costs, lower(table) if programs is None else programs)
    machine.run()
    spans = tuple(sorted(machine.spans, key=lambda s: (s.rank, s.start_s, s.end_s)))
    ranks = range(table.num_ranks)
    return Simulation(
        table=table,
        spans=spans,
        makespan_s=max(machine.now),
        exposed_s=tuple(math.fsum(exposed) for exposed in machine.exposed),
        peak_bytes=tuple(_peak(table.order(rank), costs) for rank in ranks),
        busy_s=tuple(math.fsum(costs.seconds(c) for c in table.order(rank)) for rank in ranks),
    )


@dataclass
class _UnderWay:
    """A message: when each side came to it, and when it was on the wire."""

    posted_s: dict[bool, float]
    begin_s: float = math.nan
    end_s: float = math.nan


class _Machine:
    def __init__(self, table: Table, costs: Costs, programs: Sequence[Program]) -> None:
        self.table, self.costs, self.programs = table, costs, programs
        self.now = [0.0] * table.num_ranks
        self.at = [0] * table.num_ranks
        self.computed = [False] * table.num_ranks
        """Whether the computation of the step is done, and its transfers are posted."""
        self.messages: dict[tuple[str, int, int], _UnderWay] = {}
        # The sides that must have come to a message before it goes: True is the sender.
        self.needed = {True} if costs.overlapped and costs.receives_ahead else {True, False}
        # The messages of each channel in the order in which they go, and how many have ended.
        self.channel: dict[Channel, list[Transfer]] = {}
        self.through: dict[Channel, int] = {}
        self.free_s: dict[Channel, float] = {}
        for rank, program in enumerate(programs):
            for step in program:
                for t in step.transfers:
                    if t.sends:
                        self.channel.setdefault((rank, t.peer), []).append(t)
        self.spans: list[Span] = []
        self.exposed: list[list[float]] = [[] for _ in programs]

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while self.at[rank] < len(program) and self._advance(rank, program[self.at[rank]]):
                    moved = True
        stuck = [rank for rank, program in enumerate(self.programs) if self.at[rank] < len(program)]
        if stuck:
            raise ScheduleError(f"{self.table.name}: the ranks {stuck} wait for ever; zoo.pipe.validate says for what.")

    def _advance(self, rank: int, step: Step) -> bool:
        """As far into a step as can be; True when something was done."""
        moved = False
        if not self.computed[rank]:
            if step.computation is not None and not self._compute(rank, step.computation):
                return False
            for t in step.transfers:
                found = self.messages.setdefault(t.message, _UnderWay({}))
                found.posted_s[t.sends] = self.now[rank]
                self._move((rank, t.peer) if t.sends else (t.peer, rank))
            self.computed[rank], moved = True, True
        if not self.costs.overlapped:
            batch = [self.messages[t.message] for t in step.transfers]
            if any(math.isnan(message.end_s) for message in batch):
                return moved
            self._wait(rank, batch)
        self.at[rank] += 1
        self.computed[rank] = False
        return True

    def _move(self, channel: Channel) -> None:
        """Begin the messages of a channel that both sides have come to, in order."""
        queue = self.channel.get(channel, [])
        while (k := self.through.get(channel, 0)) < len(queue):
            message = self.messages.get(queue[k].message)
            if message is None or (self.needed - message.posted_s.keys()):
                return
            posted = [message.posted_s[sends] for sends in self.needed]
            message.begin_s = max(*posted, self.free_s.get(channel, 0.0))
            message.end_s = self.free_s[channel] = message.begin_s + self.costs.transfer_s(queue[k])
            self.through[channel] = k + 1

    def _compute(self, rank: int, c: Computation) -> bool:
        awaited = []
        for alternatives in needs(c, self.table.num_stages):
            message = message_of(alternatives[0], self.table.num_stages)
            if message is None or self.table.rank_of[alternatives[0].stage] == rank:
                continue  # computed here, earlier in the order
            under_way = self.messages.get(message)
            if under_way is None or math.isnan(under_way.end_s):
                return False
            awaited.append(under_way)
        self._wait(rank, awaited)
        end = self.now[rank] + self.costs.seconds(c)
        self.spans.append(Span(rank, c, self.now[rank], end))
        self.now[rank] = end
        return True

    def _wait(self, rank: int, messages: Sequence[_UnderWay]) -> None:
        start = self.now[rank]
        until = max([start, *(message.end_s for message in messages)])
        # The part of the wait in which at least one of them is on the wire.
        covered = start
        for begin, end in sorted((message.begin_s, message.end_s) for message in messages):
            if end > covered:
                self.exposed[rank].append(end - max(begin, covered))
                covered = end
        self.now[rank] = until


def _peak(order: Sequence[Computation], costs: Costs) -> float:
    part = {Kind.FORWARD: 1.0, Kind.INPUT: -costs.freed_by_input, Kind.WEIGHT: costs.freed_by_input - 1.0}
    kept = most = 0.0
    for c in order:
        kept += _of(costs.kept_bytes, c.stage) * part.get(c.kind, -1.0)
        most = max(most, kept)
    return most if any(c.kind is not Kind.FORWARD for c in order) else 0.0


def write_spans(spans: Sequence[Span]) -> dict[str, Any]:
    """A timeline as a JSON document: ``{"spans": [{"rank", "computation": "2F5", "start_s", "end_s"}, …]}``."""
    return {
        "spans": [
            {"rank": s.rank, "computation": str(s.computation), "start_s": s.start_s, "end_s": s.end_s} for s in spans
        ]
    }


def read_spans(document: Any) -> tuple[Span, ...]:
    """The other way round; a measured timeline has the same form. Times count from any zero, the same on all ranks.

    Raises:
        ValueError: a document of another form.
    """
    entries = document.get("spans") if isinstance(document, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(
            'a timeline is {"spans": [{"rank": 0, "computation": "0F0", "start_s": 0.0, "end_s": 1.0}, …]}.'
        )
    found = []
    for entry in entries:
        try:
            rank, text, start, end = (entry[key] for key in ("rank", "computation", "start_s", "end_s"))
            span = Span(int(rank), Computation.parse(text), float(start), float(end))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{entry} is no span of a timeline: {error!r}; it has rank, computation, start_s, end_s."
            ) from error
        if not -math.inf < span.start_s <= span.end_s < math.inf or span.rank < 0:
            raise ValueError(f"{entry} is no span of a timeline: it ends before it begins, or its rank is below 0.")
        found.append(span)
    return tuple(sorted(found, key=lambda s: (s.rank, s.start_s, s.end_s)))
