"""Fit the numbers of a device and of a framework to step times that were measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from zoo.cost.hardware import Hardware
from zoo.cost.software import Software
from zoo.cost.step import Layout, step_time
from zoo.cost.transformer import Transformer

__all__ = ["Calibration", "Run", "calibrate"]

_Vector: TypeAlias = NDArray[np.float64]

_SCALE = 0.05  # relative errors above it count less than their squares
_STEP = 1e-3
_SMALL = 1e-6  # what a number that is 0 begins with


@dataclass(frozen=True, kw_only=True)
class Run:
    """A step that was measured."""

    model: Transformer
    layout: Layout
    hardware: Hardware
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted.

    Attributes:
        hardware, software: with the fitted numbers; hardware by its name. factors: by name, fitted over given.
        errors: of each run, forecast over measured - 1.
    """

    hardware: dict[str, Hardware]
    software: Software
    factors: dict[str, float]
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Of the absolute relative errors."""
        return math.fsum(map(abs, self.errors)) / len(self.errors)


def calibrate(
    runs: Sequence[Run], software: Software, free: Sequence[str], *, dtype: str = "bf16", iterations: int = 40
) -> Calibration:
    """The numbers with which forecasts come closest to measured runs.

    Minimised is Σ ρ(log forecast / measured) with ρ(e) = c² (√(1 + (e / c)²) - 1), c = 0.05, over the logarithms of
    the numbers in ``free``: Levenberg and Marquardt's method with weights (Huber 1981). A factor that is far from 1
    says that something is assumed that is not so.

    Args:
        free: names of fields of :class:`~zoo.cost.Software` and of :class:`~zoo.cost.Device` that are numbers. Those of
            devices get one factor for all hardware of the runs.

    Raises:
        ValueError: no runs; a name that is no number of these; fewer runs than names; a run without time;
            two machines of one name.
    """
    if len(runs) < max(len(free), 1):
        raise ValueError(f"{len(runs)} run(s) for {len(free)} numbers: at least as many runs are needed.")
    known = {run.hardware.name: run.hardware for run in runs}
    for run in runs:
        if not 0 < run.step_s < math.inf:
            raise ValueError(f"a run took step_s={run.step_s}; it is a number above 0.")
        if run.hardware != known[run.hardware.name]:
            raise ValueError(f"two machines of the runs are named {run.hardware.name!r}; give each its own name.")
    given = [_given(software, known, name) for name in free]

    def applied(at: _Vector) -> tuple[dict[str, Hardware], Software]:
        factors = dict(zip(free, np.exp(at).tolist(), strict=True))
        values = {n: f * v for (n, f), v in zip(factors.items(), given, strict=True) if hasattr(software, n)}
        of_device = {n: f for n, f in factors.items() if n not in values}
        return {k: _scaled(h, of_device) for k, h in known.items()}, dataclasses.replace(software, **values)

    def errors(at: _Vector) -> _Vector:
        hard, soft = applied(at)
        found = [step_time(r.model, r.layout, hard[r.hardware.name], soft, dtype=dtype).step_s / r.step_s for r in runs]
        return np.asarray(np.log(found), dtype=np.float64)

    at = _minimum(errors, np.zeros(len(free)), iterations) if free else np.zeros(0)
    hard, soft = applied(at)
    return Calibration(
        hardware=hard, software=soft, factors=dict(zip(free, np.exp(at).tolist(), strict=True)),
        errors=tuple((np.exp(errors(at)) - 1).tolist()),
    )  # fmt: skip


def _minimum(errors: Callable[[_Vector], _Vector], at: _Vector, iterations: int) -> _Vector:
    damping, now = 1e-2, errors(at)
    for _ in range(iterations):
        slopes = np.empty((len(now), len(at)))
        for i in range(len(at)):
            moved = at.copy()
            moved[i] += _STEP
            slopes[:, i] = (errors(moved) - now) / _STEP
        weights = 1 / np.sqrt(1 + (now / _SCALE) ** 2)
        normal = slopes.T @ (weights[:, None] * slopes)
        gradient = slopes.T @ (weights * now)
        for _ in range(8):
            scaled = normal + damping * np.diag(np.diag(normal) + 1e-9)
            move = np.clip(-np.linalg.solve(scaled, gradient), -1.0, 1.0)
            found = errors(at + move)
            if _cost(found) < _cost(now):
                better = _cost(now) - _cost(found)
                at, now, damping = at + move, found, damping / 4
                break
            damping *= 4
        else:
            return at
        if better < 1e-7 * _cost(now):
            return at
    return at


def _cost(errors: _Vector) -> float:
    return float(np.sum(np.sqrt(1 + (errors / _SCALE) ** 2) - 1))


def _given(software: Software, known: dict[str, Hardware], name: str) -> float:
    """The number that is fitted; 1 for a device's, which gets a factor."""
    found = getattr(software, name, None)
    if _is_number(found):
        return max(float(found), _SMALL)
    for hardware in known.values():
        if not _is_number(getattr(hardware.device, name, None)):
            raise ValueError(f"{name!r} is no number of a Software or of a Device.")
    return 1.0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scaled(hardware: Hardware, factors: dict[str, float]) -> Hardware:
    changed = {name: getattr(hardware.device, name) * factor for name, factor in factors.items()}
    return dataclasses.replace(hardware, device=dataclasses.replace(hardware.device, **changed))
