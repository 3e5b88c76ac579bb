"""Numbers of many steps in few buckets: the smallest, the largest and the mean of each, so that no spike is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Buckets"]

Numbers: TypeAlias = npt.NDArray[np.float64]
_PARTS = ("low", "high", "total", "count")
_NOTHING = {"low": np.nan, "high": np.nan, "total": 0.0, "count": 0.0}


class Buckets:
    """Of each series, by bucket of ``width`` steps: low = min x, high = max x, total = Σ x, count.

    Bucket i has the steps i·width + 1 to (i + 1)·width. Where more than ``most`` buckets would be needed, neighbours
    become one: memory does not grow with the run. What is not finite is counted and left out.

    Args:
        most: buckets, an even number. width: steps of each, to begin with.

    Attributes:
        series: by name arrays (most,) of each of low, high, total and count; NaN where nothing is known.
        not_finite: by name how many were left out. first, last: steps seen; 0: none. num_steps: how many.
    """

    def __init__(self, most: int, width: int = 1) -> None:
        if most < 2 or most % 2:
            raise ValueError(f"most={most} buckets; it is an even number from 2 on.")
        self.most, self.width = most, max(1, width)
        self.series: dict[str, dict[str, Numbers]] = {}
        self.not_finite: dict[str, int] = {}
        self.first = self.last = self.num_steps = 0

    @property
    def size(self) -> int:
        """Buckets that are in use."""
        return -(-self.last // self.width)

    def add(self, steps: npt.NDArray[np.int64], columns: Mapping[str, Numbers]) -> None:
        """Records in the order in which they were written: (n,) steps from 1, and (n,) values of each series, NaN for
        none. Where steps go back, what was known of later ones is void: a resumed run has made them again."""
        cuts = np.flatnonzero(np.diff(steps) <= 0) + 1
        for at in np.split(np.arange(len(steps)), cuts):
            if len(at):
                part = slice(int(at[0]), int(at[-1]) + 1)
                self._add_run(steps[part], {name: values[part] for name, values in columns.items()})

    def _add_run(self, steps: npt.NDArray[np.int64], columns: Mapping[str, Numbers]) -> None:
        first, last = int(steps[0]), int(steps[-1])
        self._make_room(last)
        if first <= self.last:
            self.forget(first)
        places = (steps - 1) // self.width
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        where = places[starts]
        for name, given in columns.items():
            fine = np.isfinite(given)
            bad = int(np.isinf(given).sum())
            if bad:
                self.not_finite[name] = self.not_finite.get(name, 0) + bad
            if not fine.any():
                continue
            values = np.where(fine, given, np.nan)
            self._join(
                name, where, low=np.fmin.reduceat(values, starts), high=np.fmax.reduceat(values, starts),
                total=np.add.reduceat(np.where(fine, given, 0.0), starts),
                count=np.add.reduceat(fine.astype(np.float64), starts),
            )  # fmt: skip
        self.first, self.last = min(self.first or first, first), last
        self.num_steps += len(steps)

    def _join(
        self, name: str, where: npt.NDArray[Any], *, low: Numbers, high: Numbers, total: Numbers, count: Numbers
    ) -> None:
        found = self.series.get(name)
        if found is None:
            found = self.series[name] = {part: np.full(self.most, _NOTHING[part]) for part in _PARTS}
        found["low"][where] = np.fmin(found["low"][where], low)
        found["high"][where] = np.fmax(found["high"][where], high)
        with np.errstate(over="ignore"):  # an infinite mean is not drawn
            found["total"][where] += total
        found["count"][where] += count

    def _make_room(self, last: int) -> None:
        while last > self.width * self.most:
            self.double()

    def double(self) -> None:
        """Two neighbours become one."""
        self.width *= 2
        for found in self.series.values():
            for part in _PARTS:
                pairs = found[part].reshape(-1, 2)
                join = {"low": np.fmin, "high": np.fmax}.get(part, np.add)
                found[part] = np.concatenate(
                    [join(pairs[:, 0], pairs[:, 1]), np.full(self.most // 2, _NOTHING[part])]
                )  # fmt: skip

    def forget(self, step: int) -> None:
        """This step and those after it, as far as they have buckets of their own."""
        keep = -(-(step - 1) // self.width)
        for found in self.series.values():
            for part in _PARTS:
                found[part][keep:] = _NOTHING[part]
        self.num_steps = max(0, self.num_steps - max(0, self.last - step + 1))
        self.last = step - 1

    def merge(self, later: Buckets) -> None:
        """What was written after this, in buckets as wide or wider."""
        if not later.last:
            return
        while self.width < later.width:
            self.double()
        while later.width < self.width:
            later.double()
        if self.width != later.width or self.most != later.most:
            raise AssertionError(f"buckets of {self.width} and {later.width} steps do not fit.")
        self._make_room(later.last)
        if later.first <= self.last:
            self.forget(later.first)
        where = np.arange(self.most)
        for name, found in later.series.items():
            self._join(name, where, **found)
        for name, count in later.not_finite.items():
            self.not_finite[name] = self.not_finite.get(name, 0) + count
        self.first = min(self.first or later.first, later.first)
        self.last, self.num_steps = later.last, self.num_steps + later.num_steps

    def mean(self, name: str) -> Numbers:
        """(size,) means; NaN where nothing is known."""
        found = self.series[name]
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((found["total"] / found["count"])[: self.size])

    # -- between processes --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "most": self.most, "width": self.width, "first": self.first, "last": self.last,
            "num_steps": self.num_steps, "not_finite": self.not_finite,
            "series": {n: {p: _plain(f[p][: self.size]) for p in _PARTS} for n, f in self.series.items()},
        }  # fmt: skip

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Buckets:
        """What :meth:`to_dict` gave."""
        found = cls(given["most"], given["width"])
        found.first, found.last, found.num_steps = given["first"], given["last"], given["num_steps"]
        found.not_finite = dict(given["not_finite"])
        where = np.arange(found.size)
        for name, parts in given["series"].items():
            found._join(name, where, **{part: np.array(parts[part], dtype=np.float64) for part in _PARTS})
        return found


def _plain(values: Numbers) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]
