"""Backwards in two parts, on stages that go there and back."""

from __future__ import annotations

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import Progress, place_by_rule
from zoo.pipe.schedules.table import Computation, Kind, Table, v_shaped

__all__ = ["ZBV"]


class ZBV:
    """Rank r of R has the stages a = r and b = 2R - 1 - r; every backward is I and W.

    1. 2 (R - r) - 1 times F of a, until micro-batch 0 is back;
    2. r times F of b, F of a;
    3. R - r times F, I, W of b;
    4. F, I, W of a and F, I, W of b in turn, until no F is left;
    5. whichever I is ready, that of b first, and a W where none is.

    Bubble with F = I = W: (R-1) / (6M+R-1), for M ≥ R. A rank keeps up to 2R micro-batches of a stage each, which is
    1F1B's memory on rank 0, as a stage is half of 1F1B's; and the same on all ranks.

    Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), section 6 (ZB-V).
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Two stages a rank, there and back."""
        return v_shaped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("zb_v", num_ranks, num_micro_batches)
        ahead = [_until_forwards_end(r, num_ranks, num_micro_batches) for r in range(num_ranks)]
        at = [0] * num_ranks

        def rule(r: int, progress: Progress) -> Computation | None:
            if at[r] < len(ahead[r]):
                c = ahead[r][at[r]]
                if not progress.ready(c):
                    return None
                at[r] += 1
                return c
            a, b = r, 2 * num_ranks - 1 - r
            for kind, stage in ((Kind.INPUT, b), (Kind.INPUT, a), (Kind.WEIGHT, a), (Kind.WEIGHT, b)):
                if (found := progress.next_of(kind, stage)) is not None:
                    return found
            return None

        return place_by_rule(
            "zb_v",
            v_shaped(num_ranks),
            num_micro_batches,
            rule,
            num_computations=6 * num_ranks * num_micro_batches,
        )


def _until_forwards_end(r: int, num_ranks: int, num_micro_batches: int) -> list[Computation]:
    """Parts 1 to 4, without what is beyond the last micro-batch."""
    a, b = r, 2 * num_ranks - 1 - r
    of_a, of_b = ([(kind, stage) for kind in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)] for stage in (a, b))
    pattern = [of_a[0]] * (2 * (num_ranks - r) - 1) + [of_b[0], of_a[0]] * r + of_b * (num_ranks - r)
    pattern += (of_a + of_b) * max(0, num_micro_batches - num_ranks)
    done: dict[tuple[Kind, int], int] = {}
    found = []
    for kind, stage in pattern:
        m = done.get((kind, stage), 0)
        if m < num_micro_batches:
            found.append(Computation(kind, stage, m))
            done[kind, stage] = m + 1
    return found
