"""Every schedule there is: a new one is admitted by a line here.

The line says which sizes it takes, how long a batch is and what a rank keeps, where F = I = W = 1 and transfers cost
nothing. R ranks, M micro-batches; a stage of a schedule with v stages a rank is a v-th of the model's part of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st

from zoo.pipe import Table, build


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    takes: Callable[[int, int], bool] = lambda R, M: True
    bubble: Callable[[int, int], float] = lambda R, M: 0.0
    """1 - busy / (R · makespan), for sizes where ``optimal``."""
    optimal: Callable[[int, int], bool] = lambda R, M: M >= 2 * R
    kept: Callable[[int, int], list[int]] = lambda R, M: [M] * R
    """The most micro-batches · stages that each rank keeps, for sizes where ``optimal``."""

    def build(self, num_ranks: int, num_micro_batches: int) -> Table:
        return build(self.name, num_ranks, num_micro_batches, **self.options)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.options.values())])


def interleaved(v: int) -> Case:
    return Case(
        name="interleaved_1f1b",
        options={"num_chunks": v},
        bubble=lambda R, M: (R - 1) / (v * M + R - 1),
        optimal=lambda R, M: M % R == 0,
        kept=lambda R, M: [min((v + 1) * R - 2 * r - 1, v * M) for r in range(R)],
    )


CASES = [
    Case(name="inference", bubble=lambda R, M: (R - 1) / (M + R - 1), optimal=lambda R, M: True,
         kept=lambda R, M: [0] * R),
    Case(name="gpipe", bubble=lambda R, M: (R - 1) / (M + R - 1), optimal=lambda R, M: True),
    Case(name="1f1b", bubble=lambda R, M: (R - 1) / (M + R - 1), optimal=lambda R, M: True,
         kept=lambda R, M: [min(R - r, M) for r in range(R)]),
    interleaved(1), interleaved(2), interleaved(3),
    Case(name="zb_h1", bubble=lambda R, M: (R - 1) / (3 * M + R - 1), optimal=lambda R, M: M >= R,
         kept=lambda R, M: [R] * R),
    Case(name="zb_v", bubble=lambda R, M: (R - 1) / (6 * M + R - 1), optimal=lambda R, M: M >= R,
         kept=lambda R, M: [min(2 * R, M + r + 1) for r in range(R)]),
    Case(name="dualpipe_v", takes=lambda R, M: M >= 2 * R, bubble=lambda R, M: (R - 1) / (6 * M + R - 1),
         kept=lambda R, M: [min(2 * R + 1, 2 * M)] * R),
    Case(name="data_parallel", takes=lambda R, M: R == 1, optimal=lambda R, M: True, kept=lambda R, M: [1]),
]  # fmt: skip

KINDS = {case.name for case in CASES}


def all_sizes(case: Case, max_ranks: int = 16, max_micro_batches: int = 64) -> Iterator[tuple[int, int]]:
    return ((R, M) for R in range(1, max_ranks + 1) for M in range(1, max_micro_batches + 1) if case.takes(R, M))


def some_sizes(case: Case) -> Iterator[tuple[int, int]]:
    """A share of them: small, odd, and the largest."""
    return ((R, M) for R in (1, 2, 3, 5, 16) for M in (1, 2, 3, 8, 33, 64) if case.takes(R, M))


@st.composite
def tables(draw: st.DrawFn, max_ranks: int = 16, max_micro_batches: int = 64) -> Table:
    """A schedule of the battery and sizes that it takes."""
    case = draw(st.sampled_from(CASES))
    ranks = 1 if case.name == "data_parallel" else draw(st.integers(1, max_ranks))
    least = 2 * ranks if case.name == "dualpipe_v" else 1
    return case.build(ranks, draw(st.integers(least, max(least, max_micro_batches))))
