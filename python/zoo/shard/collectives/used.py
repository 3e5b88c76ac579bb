"""Elements of a bucket without its padding, one after the other: what is worth sending, and what errors are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zoo.layout import FlatLayout


@dataclass(frozen=True)
class UsedRun:
    """``length`` elements from ``start`` of the bucket, which are those from ``at`` without padding."""

    start: int
    length: int
    at: int


class Used:
    """The elements of parameters in [start, stop) of a bucket.

    Attributes:
        numel: how many.
    """

    def __init__(self, layout: FlatLayout, start: int, stop: int) -> None:
        self.start, self.stop, self._runs = start, stop, list[UsedRun]()
        self.numel = 0
        for piece in layout.slices(start, stop):
            first = start + piece.offset
            if self._runs and self._runs[-1].start + self._runs[-1].length == first:
                last = self._runs.pop()
                self._runs.append(UsedRun(last.start, last.length + piece.length, last.at))
            else:
                self._runs.append(UsedRun(first, piece.length, self.numel))
            self.numel += piece.length

    def within(self, start: int, stop: int) -> list[UsedRun]:
        """The runs inside of [start, stop) of the bucket."""
        found = []
        for run in self._runs:
            low, high = max(run.start, start), min(run.start + run.length, stop)
            if low < high:
                found.append(UsedRun(low, high - low, run.at + low - run.start))
        return found

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """[start, stop) of the bucket from used element ``first`` to before used element ``last``."""
        found = list(self._between(first, last))
        return (found[0].start, found[-1].start + found[-1].length) if found else (self.start, self.start)

    def expanded(self, values: torch.Tensor, first: int) -> torch.Tensor:
        """``values`` of the used elements from ``first`` on as elements of the bucket, 0 in between."""
        low, high = self.range_of(first, first + values.numel())
        found = values.new_zeros(high - low)
        for run in self._between(first, first + values.numel()):
            found[run.start - low : run.start - low + run.length] = values[run.at - first : run.at - first + run.length]
        return found

    def packed(self, values: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """The other way round."""
        low, _ = self.range_of(first, last)
        parts = [values[run.start - low : run.start - low + run.length] for run in self._between(first, last)]
        return torch.cat(parts) if parts else values.new_empty(0)

    def _between(self, first: int, last: int) -> Iterator[UsedRun]:
        for run in self._runs:
            low, high = max(run.at, first), min(run.at + run.length, last)
            if low < high:
                yield UsedRun(run.start + low - run.at, high - low, low)
