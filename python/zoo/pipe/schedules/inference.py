"""Forwards only."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["Inference"]


class Inference:
    """F of stage s for micro-batch m in slot s + m; M + S - 1 slots.

    Bubble (S-1) / (M+S-1). No activations are kept.
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage a rank."""
        return looped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("inference", num_ranks, num_micro_batches)
        orders = [[Computation(Kind.FORWARD, s, m) for m in range(num_micro_batches)] for s in range(num_ranks)]
        return place("inference", orders, looped(num_ranks), num_micro_batches, trains=False)
