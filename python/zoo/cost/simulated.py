"""The time of a step of a job that ran under virtual time (:mod:`zoo.sim`), in parts that add up to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zoo.cost.events import Timeline

__all__ = ["STEP", "SimulatedTime", "simulated_time"]

STEP = "a step begins"
"""The name of the computation of 0 s with which a rank says so."""


@dataclass(frozen=True, kw_only=True)
class SimulatedTime:
    """Seconds of the last step of the rank that it takes the longest; the parts add up to ``step_s``.

    Attributes:
        compute_s: its operators. waits_s: what it waited for, by what that is. update_s: the optimizer.
            offload_s: copies between device and host, and files on NVMe, as far as nothing hides them.
        units: of a step of all ranks, such as tokens. ranks: of the job.
        not_counted: what the job does that has no time here, in words.
    """

    compute_s: float
    waits_s: Mapping[str, float] = field(default_factory=dict)
    update_s: float = 0.0
    offload_s: float = 0.0
    units: int
    ranks: int
    not_counted: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """The sum of the parts."""
        return math.fsum((self.compute_s, *self.waits_s.values(), self.update_s, self.offload_s))

    @property
    def units_per_s(self) -> float:
        """Of all ranks."""
        return self.units / self.step_s if self.step_s else 0.0

    def lines(self) -> list[str]:
        """As text: the step, and its parts."""
        parts = {
            "computing": self.compute_s, **{f"waiting for {name}": s for name, s in sorted(self.waits_s.items())},
            "optimizer": self.update_s, "exposed copies and files": self.offload_s,
        }  # fmt: skip
        step_s = self.step_s or 1.0
        return [
            f"a step: {self.step_s:.3g} s, {self.units_per_s:,.0f} a second, from a run of the job under virtual time",
            *(f"  {name:<36}{s:>10.3g} s {s / step_s:>6.1%}" for name, s in parts.items() if s > 5e-4 * step_s),
            *(f"  not counted: {what}" for what in self.not_counted),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything."""
        return {
            "step_s": self.step_s, "compute_s": self.compute_s, "waits_s": dict(self.waits_s),
            "update_s": self.update_s, "offload_s": self.offload_s, "units": self.units, "ranks": self.ranks,
            "units_per_s": self.units_per_s, "not_counted": list(self.not_counted),
        }  # fmt: skip


def simulated_time(timeline: Timeline, *, units: int, ranks: int, not_counted: tuple[str, ...] = ()) -> SimulatedTime:
    """Of the last step in a timeline in which every rank says when a step begins (:data:`STEP`).

    Raises:
        ValueError: a rank never says so.
    """
    longest: tuple[float, int, float] = (-1.0, 0, 0.0)
    for place, rank in enumerate(timeline.ranks):
        begun = [start for start, _, name in timeline.computed[place] if name == STEP]
        if not begun:
            raise ValueError(f"rank {rank} does not say when a step begins.")
        longest = max(longest, (timeline.ends_s[place] - begun[-1], rank, begun[-1]))
    _, rank, begun_s = longest
    place = timeline.ranks.index(rank)
    computed = math.fsum(end - start for start, end, _ in timeline.computed[place] if start >= begun_s)
    waits: dict[str, float] = {}
    for span in timeline.waits(rank):
        if span.start_s >= begun_s:
            waits[span.name] = waits.get(span.name, 0.0) + span.end_s - span.start_s
    return SimulatedTime(compute_s=computed, waits_s=waits, units=units, ranks=ranks, not_counted=not_counted)
