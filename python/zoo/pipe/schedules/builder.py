"""What every schedule offers: a placement of stages, and a table for so many ranks and micro-batches."""

from __future__ import annotations

from typing import Any, Protocol

from zoo import registry
from zoo.pipe.schedules.table import ScheduleError, Table

__all__ = ["ScheduleBuilder", "build", "check_sizes", "names"]


class ScheduleBuilder(Protocol):
    """A component of the kind "pipe_schedule". The runner asks it once for each number of micro-batches."""

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The same table on every rank; ScheduleError for sizes that the schedule is not for."""


def build(name: str, num_ranks: int, num_micro_batches: int, **options: Any) -> Table:
    """The table of the schedule with this name in the registry.

    Raises:
        ValueError: no such name or option, or sizes that the schedule is not for.
    """
    builder: ScheduleBuilder = registry.build("pipe_schedule", name, options)
    return builder.build(num_ranks, num_micro_batches)


def names() -> list[str]:
    """All schedules that the registry knows."""
    return registry.names("pipe_schedule")


def check_sizes(name: str, num_ranks: int, num_micro_batches: int) -> None:
    """Raise ScheduleError for sizes below 1."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} got {num_ranks} ranks and {num_micro_batches} micro-batches; it takes one or more of both."
        )
