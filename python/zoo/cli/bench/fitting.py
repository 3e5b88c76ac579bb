"""The line t = α + x / β through measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_NOTHING = 1e-13


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds of a transfer of x bytes: t(x) = α + x / β.

    Attributes:
        alpha_s: α, what it takes however few the bytes are.
        bytes_per_s: β; infinite where the times do not grow with the bytes.
        error: the mean of |t(x) − measured| / measured over the points.
    """

    alpha_s: float
    bytes_per_s: float
    error: float

    def seconds(self, num_bytes: float) -> float:
        """t(x)."""
        return self.alpha_s + num_bytes / self.bytes_per_s

    def to_dict(self) -> dict[str, float | None]:
        """As plain values; None for an infinite β, which JSON does not have."""
        return {**asdict(self), "bytes_per_s": self.bytes_per_s if math.isfinite(self.bytes_per_s) else None}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Line:
        """The other way round."""
        rate = given["bytes_per_s"]
        return cls(
            alpha_s=float(given["alpha_s"]), bytes_per_s=math.inf if rate is None else float(rate),
            error=float(given["error"]),
        )  # fmt: skip


def fit(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """α ≥ 0 and 1/β ≥ 0 with the least sum of ((t(x) − measured) / measured)².

    Relative errors, because sizes span decades: absolute ones would be those of the largest messages alone, and α be
    left to chance. Where the best line has a negative α or 1/β, the better one of those with a zero there is taken.

    Args:
        num_bytes: x of each point, at least two different ones.
        seconds: what was measured, above 0.

    Raises:
        ValueError: fewer points, or times that are not above 0.
    """
    x, t = np.asarray(num_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.shape != t.shape or len(np.unique(x)) < 2:
        raise ValueError(
            f"a line needs times of at least two different sizes; given are {len(t)} times of the sizes "
            f"{sorted(set(map(int, x)))}."
        )
    if not (np.isfinite(t).all() and (t > 0).all()):
        raise ValueError(f"times are to be above 0; given are {list(map(float, t))}.")
    scale = float(x.max())
    columns = np.stack([1 / t, x / scale / t], axis=1)
    alpha, slope = _not_negative(columns)
    # What is left of a zero by rounding is a zero.
    alpha, slope = alpha * (alpha > _NOTHING * slope), slope * (slope > _NOTHING * alpha) / scale
    error = float(np.mean(np.abs((alpha + slope * x) / t - 1)))
    return Line(alpha_s=alpha, bytes_per_s=1 / slope if slope > 0 else math.inf, error=error)


def _not_negative(columns: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Two numbers that are not negative, whose combination of the columns is nearest to ones."""
    ones = np.ones(len(columns))
    both, *_ = np.linalg.lstsq(columns, ones, rcond=None)
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = []
    for place in range(2):
        column = columns[:, place]
        value = float(column @ ones / (column @ column))
        alone.append((float(np.sum((value * column - 1) ** 2)), place, value))
    _, place, value = min(alone)
    return (value, 0.0) if place == 0 else (0.0, value)
