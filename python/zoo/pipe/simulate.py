"""When will each computation run? A simulation of the programs of a table from costs of computations and transfers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.cost.events import Compute, EventError, Start, Wait, simulate_events
from zoo.cost.stages import ComputationKind, StageCosts
from zoo.pipe.lowering import Program, Transfer, What, lower, message_of
from zoo.pipe.schedules.placing import needs
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table

__all__ = ["Simulation", "Span", "read_spans", "simulate", "write_spans"]


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


def simulate(table: Table, costs: StageCosts | None = None, *, programs: Sequence[Program] | None = None) -> Simulation:
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
    costs = costs if costs is not None else StageCosts()
    costs.check(table.num_stages)
    lowered = lower(table) if programs is None else programs
    try:
        found = simulate_events(programs_of(table, costs, lowered), lambda start: costs.message_s(start.num_bytes))
    except EventError as error:
        raise ScheduleError(f"{table.name}: {error} zoo.pipe.validate says more.") from error
    spans = []
    for rank, program in enumerate(lowered):
        computed = (step.computation for step in program if step.computation is not None)
        timed = found.computed[rank]
        spans += [Span(rank, c, start, end) for c, (start, end, _) in zip(computed, timed, strict=True)]
    ranks = range(table.num_ranks)
    return Simulation(
        table=table,
        spans=tuple(sorted(spans, key=lambda s: (s.rank, s.start_s, s.end_s))),
        makespan_s=found.makespan_s,
        exposed_s=found.wire_s,
        peak_bytes=tuple(_peak(table.order(rank), costs) for rank in ranks),
        busy_s=tuple(math.fsum(costs.seconds(_NAME[c.kind], c.stage) for c in table.order(rank)) for rank in ranks),
    )


_NAME: dict[Kind, ComputationKind] = {kind: kind.value for kind in Kind}


def programs_of(table: Table, costs: StageCosts, programs: Sequence[Program]) -> list[list[Compute | Start | Wait]]:
    """What each rank computes, begins and waits for, in the words of :mod:`zoo.cost.events`."""
    ahead = costs.overlapped and costs.receives_ahead
    found = []
    for rank, program in enumerate(programs):
        items: list[Compute | Start | Wait] = []
        if ahead:  # receives are there before anything is
            items += [_start(t, rank, costs) for step in program for t in step.transfers if not t.sends]
        for step in program:
            if step.computation is not None:
                kind = _NAME[step.computation.kind]
                awaited = tuple(_awaited(table, rank, step.computation))
                items += [Wait(awaited)] * bool(awaited)
                items.append(Compute(costs.seconds(kind, step.computation.stage), kind))
            items += [_start(t, rank, costs) for t in step.transfers if t.sends or not ahead]
            if not costs.overlapped and step.transfers:
                items.append(Wait(tuple(t.message for t in step.transfers)))
        found.append(items)
    return found


def _start(t: Transfer, rank: int, costs: StageCosts) -> Start:
    """Messages from one rank to another go one after the other."""
    channel = (rank, t.peer) if t.sends else (t.peer, rank)
    members = (min(channel), max(channel))
    return Start(t.message, members, channel, "send", costs.message_bytes(t.what, t.stage), t.what)


def _awaited(table: Table, rank: int, c: Computation) -> Iterator[tuple[What, int, int]]:
    """The messages that a computation needs. What is computed on its rank, was so earlier in the order."""
    for alternatives in needs(c, table.num_stages):
        message = message_of(alternatives[0], table.num_stages)
        if message is not None and table.rank_of[alternatives[0].stage] != rank:
            yield message


def _peak(order: Sequence[Computation], costs: StageCosts) -> float:
    part = {Kind.FORWARD: 1.0, Kind.INPUT: -costs.freed_by_input, Kind.WEIGHT: costs.freed_by_input - 1.0}
    kept = most = 0.0
    for c in order:
        kept += costs.kept(c.stage) * part.get(c.kind, -1.0)
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
