"""Forwards only."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["Inference", "forwards"]


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
        return forwards(looped(num_ranks), num_micro_batches)


def forwards(rank_of: tuple[int, ...], num_micro_batches: int) -> Table:
    """The same for any placement of stages: a rank computes what could begin first, then the later stage."""
    check_sizes("inference", len(set(rank_of)), num_micro_batches)
    every = [Computation(Kind.FORWARD, s, m) for s in range(len(rank_of)) for m in range(num_micro_batches)]
    every.sort(key=lambda c: (c.stage + c.micro_batch, -c.stage))
    orders = [[c for c in every if rank_of[c.stage] == rank] for rank in range(max(rank_of) + 1)]
    return place("inference", orders, rank_of, num_micro_batches, trains=False)
