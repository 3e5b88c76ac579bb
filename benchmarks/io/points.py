"""The settings that are searched for each contender before the rounds, and how the best of them is chosen."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of an engine; what an engine does not have keeps its default.

    ``fixed``: fio's fixedbufs and registerfiles; ``overlap_events``: DeepSpeed's option of that name.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    num_threads: int = 1
    overlap_events: bool = False
    fixed: bool = False

    @property
    def text(self) -> str:
        """E.g. ``1 MiB x 8, 2 threads``."""
        size = f"{self.block_size >> 20} MiB" if self.block_size % (1 << 20) == 0 else f"{self.block_size >> 10} KiB"
        parts = [f"{size} x {self.queue_depth}"]
        if self.num_threads > 1:
            parts.append(f"{self.num_threads} threads")
        if self.overlap_events:
            parts.append("overlap")
        if self.fixed:
            parts.append("fixed")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """For a worker's specification."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every combination of these; the last three only where ``varies`` names them."""

    block_sizes: tuple[int, ...]
    queue_depths: tuple[int, ...]
    num_threads: tuple[int, ...] = (1,)

    def points(self, varies: Sequence[str]) -> list[Point]:
        """``varies`` holds some of "num_threads", "overlap_events" and "fixed"; the first point is the smallest."""
        threads = self.num_threads if "num_threads" in varies else (1,)
        overlaps = (False, True) if "overlap_events" in varies else (False,)
        fixed = (False, True) if "fixed" in varies else (False,)
        return [
            Point(block_size=b, queue_depth=d, num_threads=t, overlap_events=o, fixed=f)
            for b, d, t, o, f in itertools.product(self.block_sizes, self.queue_depths, threads, overlaps, fixed)
        ]


def best_point(figures: Sequence[tuple[Point, dict[str, Any]]]) -> Point | None:
    """The point of the highest median rate over its passes; among equals the first. None where none was measured."""
    rates: dict[Point, list[float]] = {}
    for point, figure in figures:
        rates.setdefault(point, []).append(figure["num_bytes"] / figure["wall_s"])
    return max(rates, key=lambda point: statistics.median(rates[point]), default=None)
