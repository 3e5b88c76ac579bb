"""A step of a compiled model in time and memory, foretold: what each segment computes and what each event communicates.

The order is that which happened; all seconds are foretold, from sizes, a device's rates and α–β of its links. So a step
on one small machine says what it would take on many large ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zoo.compile.plan import GraphPlan
from zoo.compile.profile import Segment
from zoo.cost import Compute, Hardware, Program, Start, Timeline, Wait, cost_on, simulate_events
from zoo.plan import Actions, Kind

if TYPE_CHECKING:
    from zoo.compile.whole import WholeGraph

__all__ = ["Moment", "Recording", "recording"]


@dataclass(frozen=True)
class Mark:
    """A graph begins this segment, after so many actions."""

    plan: GraphPlan
    backward: bool
    segment: int
    actions: int

    @property
    def of(self) -> Segment:
        """What it takes."""
        return self.plan.segments[self.backward][self.segment]

    @property
    def name(self) -> str:
        """Such as "enter blocks.0"."""
        if not self.of.event:
            return "backward" if self.backward else "forward"
        return f"{self.of.event} {self.plan.captured.calls[self.of.call].unit.name or '(model)'}"


@dataclass(frozen=True)
class Moment:
    """Memory while a segment runs.

    Attributes:
        name: "enter blocks.0", … backward: of which graph. start_s, end_s: when it runs.
        gathered_bytes: of parameters that are whole or on their way. value_bytes: of what the graphs have made.
    """

    name: str
    backward: bool
    start_s: float
    end_s: float
    gathered_bytes: int
    value_bytes: int


@dataclass
class Recording:
    """What happened in graphs.

    Attributes:
        actions: of the runtime, in the order in which they began. marks: of the graphs, in order.
    """

    actions: Actions
    marks: list[Mark] = field(default_factory=list)

    def program(self, hardware: Hardware, *, ranks: int, computes: float = 1.0) -> Program:
        """What one rank does (:func:`zoo.cost.simulate_events`), each collective among ``ranks`` instead of those that
        took part. They go one after the other, as those of one group do.

        Args:
            computes: all seconds of computation are times this.

        Raises:
            HardwareError: the device states no FLOP/s for a dtype that is multiplied in.
        """
        program: list[Compute | Start | Wait] = []
        begun: dict[tuple[Kind | None, int], list[tuple[int, int]]] = {}
        position = 0
        for mark in self.marks:
            self._communicate(program, begun, range(position, mark.actions), ranks)
            position = mark.actions
            program.append(Compute(computes * mark.of.seconds(hardware.device), mark.name))
        self._communicate(program, begun, range(position, len(self.actions)), ranks)
        return program

    def _communicate(
        self, program: list[Compute | Start | Wait], begun: dict[tuple[Kind | None, int], list[tuple[int, int]]],
        numbers: range, ranks: int,
    ) -> None:  # fmt: skip
        for number in numbers:
            action = self.actions[number]
            keys = [(number, i) for i in range(len(action.collectives))]
            kind = Kind.UNSHARD if action.kind is Kind.PREFETCH else action.kind
            if action.kind is Kind.WAIT:
                program.append(Wait(tuple(begun.pop((action.of, action.bucket), ()))))
            for key, collective in zip(keys, action.collectives, strict=True):
                given = collective.num_bytes / (ranks if collective.op == "all_gather" else 1)
                name = f"{action.verb} {action.label}".strip()
                program.append(Start(key, tuple(range(ranks)), "communication", collective.op, given, name))
            if action.kind is Kind.WAIT:  # what of it begins only when the rest is over
                program.append(Wait(tuple(keys)))
            else:
                begun.setdefault((kind, action.bucket), []).extend(keys)

    def simulate(self, hardware: Hardware, *, ranks: int, computes: float = 1.0) -> Timeline:
        """The step on so many equal ranks; ``Timeline.exposed_s`` is the communication that nothing hides."""
        program = self.program(hardware, ranks=ranks, computes=computes)
        return simulate_events([program] * ranks, cost_on(hardware))

    def memory(self, timeline: Timeline) -> list[Moment]:
        """Bytes by segment, over the seconds of a simulated step."""
        whole = [0, *self.actions.whole_bytes()]
        found, before = [], 0
        for mark, (start_s, end_s, name) in zip(self.marks, timeline.computed[0], strict=True):
            held = max(whole[before + 1 : mark.actions + 1], default=whole[mark.actions])
            found.append(Moment(name, mark.backward, start_s, end_s, held, mark.of.live_bytes))
            before = mark.actions
        return found


@contextlib.contextmanager
def recording(whole: WholeGraph) -> Iterator[Recording]:
    """What happens inside, in graphs of ``whole`` and between them.

    On several ranks (those of :mod:`zoo.sim` will do), and not in the first step: one rank alone gathers nothing ahead,
    and what comes next is known from the pass before.
    """
    from zoo.shard.runtime.recording import recording as record_actions

    with record_actions(whole.runtime) as actions:
        found = Recording(actions)

        def note(plan: GraphPlan, backward: bool, segment: int) -> None:
            found.marks.append(Mark(plan, backward, segment, len(actions)))

        before, whole.on_segment = whole.on_segment, note
        try:
            yield found
        finally:
            whole.on_segment = before
