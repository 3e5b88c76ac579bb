"""1F1B with backwards in two parts, within the memory of 1F1B."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["ZBH1"]


class ZBH1:
    """1F1B with I in the place of B; rank r does W of a micro-batch r micro-batches later than its I.

    Ranks near the end have waited at the beginning and finish their I first: the W they put off fill the time in which
    the I of the ranks before them are still on their way.

    Bubble with F = I = W: (S-1) / (3M+S-1), for M ≥ S; in general S-1 times (F + I - W) is lost. A rank keeps up to
    min(S, M) micro-batches, as many as rank 0 does in 1F1B.

    Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 2.1 (ZB-H1).
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """One stage a rank."""
        return looped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("zb_h1", num_ranks, num_micro_batches)
        orders = []
        for r in range(num_ranks):
            forward, input_, weight = (
                [Computation(kind, r, m) for m in range(num_micro_batches)]
                for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
            )
            ahead = num_ranks - r
            order = forward[:ahead]
            for m in range(num_micro_batches):
                order += [input_[m], *weight[max(0, m - r) : max(0, m - r + 1)], *forward[m + ahead : m + ahead + 1]]
            # W number m - r came with I number m; for m < r the slice above is W 0 and must not be taken twice.
            orders.append(list(dict.fromkeys(order)) + weight[max(0, num_micro_batches - r) :])
        return place("zb_h1", orders, looped(num_ranks), num_micro_batches)
