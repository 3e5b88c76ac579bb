"""What a trial came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

from zoo.tuning.space import Candidate

__all__ = ["Outcome", "Runner", "Status", "representative"]

Status = Literal["measured", "memory", "timeout", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one trial. A failure is a result: ``why`` says what it was.

    Attributes:
        step_s: seconds of a step; None where it was not measured. steps_s: of all that were measured, without what
            ranks waited for a core that other programs had.
        peak_bytes: the most resident memory of each rank.
        took_s: seconds that the trial cost, with starting its processes.

    Raises:
        ValueError: a step took no time, or one that is not finite.
    """

    status: Status
    why: str = ""
    step_s: float | None = None
    steps_s: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    took_s: float = 0.0

    def __post_init__(self) -> None:
        if self.step_s is not None and not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ValueError(f"step_s is {self.step_s}; a step takes more than 0 seconds, and an end.")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Outcome:
        """What :meth:`to_dict` gave."""
        step_s = values["step_s"]
        if values["status"] not in get_args(Status):
            raise ValueError(f"status is {values['status']!r}; allowed are {', '.join(get_args(Status))}")
        return cls(
            status=values["status"], why=str(values["why"]), step_s=None if step_s is None else float(step_s),
            steps_s=tuple(map(float, values["steps_s"])), peak_bytes=tuple(map(int, values["peak_bytes"])),
            took_s=float(values["took_s"]),
        )  # fmt: skip


class Runner(Protocol):
    """Runs trials: the search calls it, one candidate after the other."""

    def run(self, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
        """Measure a candidate. Whatever befalls it is an outcome; only the user's interrupt is raised."""


def representative(seconds: Sequence[float]) -> float:
    """The lower quartile of the seconds of steps: on a machine that others use too, slow ones tell of them."""
    ordered = sorted(seconds)
    if not ordered or not all(math.isfinite(s) and s > 0 for s in ordered):
        raise ValueError(f"the seconds of steps are {list(seconds)}; there is at least one, and each is above 0.")
    return ordered[(len(ordered) - 1) // 4]
