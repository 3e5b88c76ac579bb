"""Forwards of one direction beside backwards of the other, on stages that go there and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, ScheduleError, Table, v_shaped

__all__ = ["DualPipeV"]


class DualPipeV:
    """Rank r of R has the stages a = r and b = 2R - 1 - r. Eight parts, each so many times:

    1. 2 (R - r - 1): F of a
    2. r + 1: F of a, F of b
    3. R - r - 1: I, W, F of b
    4. M - 2R + r + 1: F of a, B of b, F of b, B of a
    5. R - r - 1: B of b, F of b, B of a
    6. r + 1: B of b, B of a; of these 2 (r + 1) backwards the second half is I, its W put off
    7. R - r - 1: the W that has waited longest, I of a
    8. r + 1: the W that has waited longest

    In parts 4 and 5 a forward and a backward of different stages and micro-batches are neighbours, which a GPU can run
    at once, one computing while the other communicates; here they are two slots, one after the other.

    R-1 times (F and B together + B - 3W) is lost where a pair is one thing. With F = I = W and the pair's two one
    after the other, neither waits for what the other needs: bubble (R-1) / (6M+R-1). Up to 2R + 1 micro-batches of a
    stage each are kept, on all ranks. M ≥ 2R.

    DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 3.2.1 (DualPipe); cut in half by
    Qi et al. 2025, "DualPipe could be better without the Dual".
    """

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """Two stages a rank, there and back."""
        return v_shaped(num_ranks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table, for 2 · ranks micro-batches or more."""
        check_sizes("dualpipe_v", num_ranks, num_micro_batches)
        if num_micro_batches < 2 * num_ranks:
            raise ScheduleError(
                f"dualpipe_v got {num_micro_batches} micro-batches on {num_ranks} ranks; it takes two a rank, "
                f"{2 * num_ranks}, or more (zb_v takes fewer)."
            )
        orders = [list(_order(r, num_ranks, num_micro_batches)) for r in range(num_ranks)]
        return place("dualpipe_v", orders, v_shaped(num_ranks), num_micro_batches)


def _order(r: int, num_ranks: int, num_micro_batches: int) -> Iterator[Computation]:
    stage = {"a": r, "b": 2 * num_ranks - 1 - r}
    done = {(kind, chunk): 0 for kind in "FB" for chunk in "ab"}
    waiting: deque[Computation] = deque()

    def run(*steps: str) -> Iterator[Computation]:
        for step in steps:
            if step == "W":
                yield waiting.popleft()
                continue
            kind, chunk = step[0], step[1]
            count = (kind if kind == "F" else "B", chunk)
            c = Computation(Kind(kind), stage[chunk], done[count])
            done[count] += 1
            if kind == "I":
                waiting.append(Computation(Kind.WEIGHT, c.stage, c.micro_batch))
            yield c

    after = num_ranks - r - 1
    both = ["b", "a"] * (r + 1)
    yield from run(*["Fa"] * (2 * after))
    yield from run(*["Fa", "Fb"] * (r + 1))
    yield from run(*["Ib", "W", "Fb"] * after)
    yield from run(*["Fa", "Bb", "Fb", "Ba"] * (num_micro_batches - 2 * num_ranks + r + 1))
    yield from run(*["Bb", "Fb", "Ba"] * after)
    yield from run(*("B" + chunk for chunk in both[: r + 1]), *("I" + chunk for chunk in both[r + 1 :]))
    yield from run(*["W", "Ia"] * after)
    yield from run(*["W"] * (r + 1))
