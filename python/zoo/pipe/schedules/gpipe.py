"""All forwards, then all backwards."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["GPipe"]


class GPipe:
    """All M forwards of a stage, then its M backwards; 2 (M + S - 1) slots.

    Bubble (S-1) / (M+S-1). A rank keeps the activations of all M micro-batches. Backwards go in the order of the
    micro-batches, not in the reverse one, so that gradients are added up as they are without a pipeline.

    Huang et al. 2019, "GPipe" (arXiv:1811.06965), section 2.3.
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage a rank."""
        return looped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("gpipe", num_ranks, num_micro_batches)
        orders = [
            [Computation(kind, s, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(num_micro_batches)]
            for s in range(num_ranks)
        ]
        return place("gpipe", orders, looped(num_ranks), num_micro_batches)
