"""No pipeline: one stage that accumulates gradients."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table, looped

__all__ = ["DataParallel"]


class DataParallel:
    """F and B of one micro-batch after the other, on one rank. No bubble, one micro-batch kept."""

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage on one rank."""
        if num_ranks != 1:
            raise ScheduleError(
                f"data_parallel got {num_ranks} pipeline ranks; it is for one, whose stage is the model."
            )
        return looped(1)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table, for one rank."""
        check_sizes("data_parallel", num_ranks, num_micro_batches)
        placement = self.placement(num_ranks)
        order = [Computation(kind, 0, m) for m in range(num_micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)]
        return place("data_parallel", [order], placement, num_micro_batches)
