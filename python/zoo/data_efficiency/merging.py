"""Sorting more numbers than fit into memory: sorted runs, merged in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Read = Callable[[int, int], tuple[Any, Any]]
"""(start, stop) → values and numbers of samples at these places, as numpy arrays."""


class _Run:
    """What is left of a sorted run, and the piece of it that is in memory."""

    def __init__(self, start: int, stop: int) -> None:
        self.next, self.stop = start, stop
        self.values: Any = None
        self.samples: Any = None

    def fill(self, read: Read, piece: int) -> bool:
        """Have something in memory; False when nothing is left."""
        if (self.values is None or not len(self.values)) and self.next < self.stop:
            end = min(self.stop, self.next + piece)
            self.values, self.samples = read(self.next, end)
            self.next = end
        return self.values is not None and len(self.values) > 0

    def take(self, value: Any, sample: Any) -> tuple[Any, Any]:
        """Take all up to (value, sample), that included."""
        low, high = (int(np.searchsorted(self.values, value, side=side)) for side in ("left", "right"))
        count = low + int(np.searchsorted(self.samples[low:high], sample, side="right"))
        found = self.values[:count], self.samples[:count]
        self.values, self.samples = self.values[count:], self.samples[count:]
        return found


def merge(runs: Sequence[tuple[int, int]], read: Read, buffer: int) -> Iterator[tuple[Any, Any]]:
    """Values in ascending order and their samples, piece by piece; equal values in the order of samples.

    Args:
        runs: [start, stop) of each run, sorted by (value, sample); the samples of a run come before those of the next.
        read: reads a part of a run.
        buffer: numbers of all runs together that are held in memory, at least one a run.
    """
    piece = max(1, buffer // max(1, len(runs)))
    left = [_Run(start, stop) for start, stop in runs]
    while left:
        left = [run for run in left if run.fill(read, piece)]
        ends = [(run.values[-1], run.samples[-1]) for run in left if run.next < run.stop]
        if ends:  # what is not in memory comes later than the end of what is
            value, sample = min(ends)
            taken = [run.take(value, sample) for run in left]
        else:
            taken = [(run.values, run.samples) for run in left]
            left = []
        if not taken:
            return
        values = np.concatenate([v for v, _ in taken])
        samples = np.concatenate([s for _, s in taken])
        order = np.argsort(values, kind="stable")
        yield values[order], samples[order]
