"""Which schedule is the fastest that fits? The forecast of each one, and why one of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.cost.stages import StageCosts
from zoo.pipe.schedules.builder import build, check_sizes
from zoo.pipe.schedules.table import ScheduleError, Table
from zoo.pipe.simulate import Simulation, simulate
from zoo.pipe.validate import check

__all__ = ["CANDIDATES", "Candidate", "Choice", "ScheduleForecast", "choose"]


@dataclass(frozen=True)
class Candidate:
    """A schedule by name, with options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name + "".join(f" {key}={value}" for key, value in self.options.items())


CANDIDATES = (
    Candidate("1f1b"),
    Candidate("gpipe"),
    Candidate("interleaved_1f1b", {"num_chunks": 2}),
    Candidate("interleaved_1f1b", {"num_chunks": 4}),
    Candidate("zb_h1"),
    Candidate("zb_v"),
    Candidate("dualpipe_v"),
)
"""What is compared where nothing else is said; of two that are equally fast the first is taken."""


@dataclass(frozen=True, kw_only=True)
class ScheduleForecast:
    """What a schedule would come to.

    Attributes:
        candidate: which one.
        simulation: None where the schedule is not for these sizes.
        refused: why it cannot be taken; "" for one that can.
    """

    candidate: Candidate
    simulation: Simulation | None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """All forecasts, fastest first, those that cannot be taken last."""

    forecasts: tuple[ScheduleForecast, ...]
    limit_bytes: float | None

    @property
    def best(self) -> ScheduleForecast:
        """The fastest that fits.

        Raises:
            ScheduleError: none does.
        """
        if self.forecasts[0].refused:
            told = "; ".join(f"{f.candidate}: {f.refused.rstrip('.')}" for f in self.forecasts)
            smaller = any(f.simulation is not None for f in self.forecasts)  # it is too large, and nothing else
            raise ScheduleError(
                f"no schedule can be taken ({told})"
                + (": allow more memory, or use smaller micro-batches or activation checkpointing." if smaller else ".")
            )
        return self.forecasts[0]

    def why(self) -> str:
        """One sentence."""
        best, *others = self.forecasts
        if best.refused or best.simulation is None:
            return "no schedule can be taken"
        time = best.simulation.makespan_s
        said = f"{best.candidate}: {time:.4g} s a batch, bubble {best.simulation.bubble:.1%}"
        second = next((f for f in others if not f.refused and f.simulation is not None), None)
        if second is not None and second.simulation is not None:
            next_time = second.simulation.makespan_s
            equal = _rounded(next_time) == _rounded(time)
            said += f"; {second.candidate} " + (
                "is as fast" if equal else f"takes {next_time:.4g} s ({next_time / time - 1:+.1%})"
            )
        faster = [
            f for f in others
            if f.refused and f.simulation is not None and _rounded(f.simulation.makespan_s) < _rounded(time)
        ]  # fmt: skip
        if faster:
            said += "; " + ", ".join(f"{f.candidate} would be faster, but {f.refused}" for f in faster)
        return said

    def __str__(self) -> str:
        head = ("schedule", "stages", "time s", "bubble", "exposed s", "kept, most", "")
        rows = [head]
        for f in self.forecasts:
            if f.simulation is None:
                rows.append((str(f.candidate), "", "", "", "", "", f.refused))
                continue
            found = f.simulation
            rows.append(
                (
                    str(f.candidate), str(found.table.num_stages), f"{found.makespan_s:.4g}", f"{found.bubble:.1%}",
                    f"{max(found.exposed_s):.4g}", f"{max(found.peak_bytes):.4g}", f.refused,
                )
            )  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True))]
            )
            + f"  {row[-1]}"
            for row in rows
        ]
        return "\n".join([*(line.rstrip() for line in lines), self.why()])


def _rounded(time_s: float) -> float:
    """Without the rounding errors in which sums of the same numbers differ."""
    return float(f"{time_s:.9g}")


def choose(
    num_ranks: int,
    num_micro_batches: int,
    costs_of: Callable[[int], StageCosts],
    *,
    limit_bytes: float | Sequence[float | None] | None = None,
    candidates: Sequence[Candidate] = CANDIDATES,
    usable: Callable[[Table], None] | None = None,
) -> Choice:
    """Simulate each candidate, and order them: those that can be taken by their time, then the others.

    The same on every rank that is given the same costs: measure on one, and let the others have its numbers.

    Args:
        num_ranks: of the pipeline. num_micro_batches: of a batch. costs_of: the costs for a number of stages (a
        ValueError says that the model cannot be cut so);
        :func:`zoo.cost.evenly` makes one from those of the whole model. limit_bytes: what a rank may keep for backwards
        (beside weights, gradients and states); one number, or one a rank, None for no limit. candidates: schedules.
        usable: raises a ScheduleError for a table that the model cannot have.

    Raises:
        ValueError: no candidates, sizes below 1, limits that are no numbers or for another number of ranks.
    """
    check_sizes("choose", num_ranks, num_micro_batches)
    if not candidates:
        raise ValueError("choose got no candidates; it takes one or more, such as Candidate('1f1b').")
    limits = list(limit_bytes) if isinstance(limit_bytes, Sequence) else [limit_bytes] * num_ranks
    if len(limits) != num_ranks:
        raise ValueError(f"choose got {len(limits)} limits for {num_ranks} ranks; it takes one number, or one a rank.")
    if any(limit is not None and not limit >= 0 for limit in limits):
        raise ValueError(f"choose got limit_bytes={limit_bytes}; a limit is a number of at least 0, or None.")
    found: list[tuple[bool, float, int, ScheduleForecast]] = []
    for index, candidate in enumerate(candidates):
        try:
            table = build(candidate.name, num_ranks, num_micro_batches, **candidate.options)
            if not table.trains:
                raise ScheduleError("it has forwards only, and does not train")
            check(table)
            if usable is not None:
                usable(table)
            simulation = simulate(table, _costs(costs_of, table.num_stages))
        except ScheduleError as error:
            found.append(
                (True, float("inf"), index, ScheduleForecast(candidate=candidate, simulation=None, refused=str(error)))
            )
            continue
        refused = _too_much(simulation, limits)
        forecast = ScheduleForecast(candidate=candidate, simulation=simulation, refused=refused)
        found.append((bool(refused), _rounded(simulation.makespan_s), index, forecast))
    whole = min((limit for limit in limits if limit is not None), default=None)
    return Choice(forecasts=tuple(f for *_, f in sorted(found, key=lambda entry: entry[:3])), limit_bytes=whole)


def _costs(costs_of: Callable[[int], StageCosts], num_stages: int) -> StageCosts:
    try:
        return costs_of(num_stages)
    except ValueError as error:
        raise ScheduleError(str(error)) from error


def _too_much(simulation: Simulation, limits: Sequence[float | None]) -> str:
    over = [
        (peak - limit, rank, peak, limit)
        for rank, (peak, limit) in enumerate(zip(simulation.peak_bytes, limits, strict=True))
        if limit is not None and peak > limit
    ]
    if not over:
        return ""
    _, rank, peak, limit = max(over)
    return f"rank {rank} would keep {peak:.4g} bytes, more than {limit:.4g}"
