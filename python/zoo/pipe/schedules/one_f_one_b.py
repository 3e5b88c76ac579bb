"""One forward, one backward, in turn."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["OneFOneB"]


class OneFOneB:
    """F of stage s for micro-batch m in slot s + 2m, its B in slot 2S - 1 - s + 2m; 2 (M + S - 1) slots.

    So stage s begins with S - s forwards (or M, if that is less), goes on with a backward and a forward in turn, and
    ends with backwards; neighbours are never busy with the same kind in one slot, and what arrives is used in the
    next slot.

    Bubble (S-1) / (M+S-1). Rank r keeps min(S - r, M) micro-batches.

    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv:2006.09503), section 2
    (PipeDream-Flush).
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage a rank."""
        return looped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("1f1b", num_ranks, num_micro_batches)
        num_slots = 2 * (num_micro_batches + num_ranks - 1)
        rows: list[list[Computation | None]] = [[None] * num_slots for _ in range(num_ranks)]
        for s, row in enumerate(rows):
            for m in range(num_micro_batches):
                row[s + 2 * m] = Computation(Kind.FORWARD, s, m)
                row[2 * num_ranks - 1 - s + 2 * m] = Computation(Kind.BACKWARD, s, m)
        return Table(
            name="1f1b",
            rank_of=looped(num_ranks),
            num_micro_batches=num_micro_batches,
            rows=tuple(map(tuple, rows)),
            trains=True,
        )
