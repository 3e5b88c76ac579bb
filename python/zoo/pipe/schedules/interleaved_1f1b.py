"""1F1B with several stages a rank."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.pipe.schedules.builder import check_sizes
from zoo.pipe.schedules.placing import place
from zoo.pipe.schedules.table import Computation, Kind, Table, looped

__all__ = ["Interleaved1F1B"]


class Interleaved1F1B:
    """v stages ("chunks") a rank, stage s on rank s mod ranks; R ranks.

    Forwards go group after group of R micro-batches, in each chunk after chunk; backwards likewise, last chunk first.
    Rank r begins with 2 (R - r - 1) + (v - 1) R forwards and one more, then a backward and a forward in turn. Where R
    does not divide M it is the order of the next M that R divides, without the micro-batches that do not exist.

    Bubble (R-1) / (vM+R-1) where R divides M; where it does not, ranks wait besides for those that are left out. Rank
    r keeps up to (v + 1) R - 2r - 1 micro-batches of a stage each; a stage is a v-th of 1F1B's.

    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv:2104.04473),
    section 2.2.2, which is for M divisible by R.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """num_chunks: stages a rank, v."""

        num_chunks: int = 2

        def __post_init__(self) -> None:
            if self.num_chunks < 1:
                raise ValueError(
                    f"interleaved_1f1b got num_chunks={self.num_chunks}; it takes one or more stages a rank."
                )

    def __init__(self, config: Config) -> None:
        self.config = config

    def placement(self, num_ranks: int) -> tuple[int, ...]:
        """``num_chunks`` stages a rank, round after round."""
        return looped(num_ranks, self.config.num_chunks)

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        """The table; any sizes."""
        check_sizes("interleaved_1f1b", num_ranks, num_micro_batches)
        chunks = self.config.num_chunks
        groups = [range(first, first + num_ranks) for first in range(0, num_micro_batches, num_ranks)]
        orders = []
        for r in range(num_ranks):
            stages = [r + chunk * num_ranks for chunk in range(chunks)]
            forwards = [Computation(Kind.FORWARD, s, m) for group in groups for s in stages for m in group]
            backwards = [Computation(Kind.BACKWARD, s, m) for group in groups for s in reversed(stages) for m in group]
            ahead = min(2 * (num_ranks - r - 1) + (chunks - 1) * num_ranks, len(forwards))
            order = forwards[:ahead]
            for i, backward in enumerate(backwards):
                order += [*forwards[ahead + i : ahead + i + 1], backward]
            orders.append([c for c in order if c.micro_batch < num_micro_batches])
        return place("interleaved_1f1b", orders, self.placement(num_ranks), num_micro_batches)
