"""How long a step takes: a linear model of what a candidate does, fitted to the trials that there are.

    seconds = Σ_k w_k x_k        x: samples, passes, bytes, … of a step on a rank

The weights are found by Bayesian linear regression (Bishop 2006, "Pattern Recognition and Machine Learning", 3.3):
before the trials w_k is Gaussian around what the first trial makes likely, each trial counts by its relative error, and
what is left uncertain is the standard deviation of a prediction. So few trials suffice, and more of them correct it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zoo.tuning.needs import Need
from zoo.tuning.space import Candidate, Job

__all__ = ["PARTS", "Model", "Part", "Prediction", "features"]

Array = npt.NDArray[np.float64]
NOISE = 0.03
"""Standard deviation of a measured time, relative to it."""
LEAST, MOST = 1e-3, 1e9
"""A time that is a smaller or a larger part of the first trial's counts as one of this part: what is computed of it is
finite."""


@dataclass(frozen=True)
class Part:
    """A term of the model: the share of the first trial's time that its whole quantity is expected to take, how far
    off that may be, and whether it can save time."""

    share: float
    spread: float
    signed: bool = False


PARTS: dict[str, Part] = {
    "samples": Part(0.8, 0.5),
    "small passes": Part(0.05, 0.1),
    "large passes": Part(0.0, 0.06, signed=True),
    "passes": Part(0.1, 0.4),  # of a small model they are most of a step
    "recomputation": Part(0.25, 0.15),
    "step": Part(0.05, 0.1),
    "states": Part(0.05, 0.1),
    "sent": Part(0.05, 0.1),
    "buckets": Part(0.005, 0.01),
    "NVMe": Part(1.0, 0.7),
    "gathers": Part(0.05, 0.1),
    "stage 1": Part(0.0, 0.05, signed=True),
    "stage 2": Part(0.0, 0.05, signed=True),
    "stage 3": Part(0.02, 0.05, signed=True),
    "tensor": Part(0.2, 0.3),
    "tensor passes": Part(0.1, 0.15),
    "bubble": Part(0.7, 0.4),
    "pipe passes": Part(0.1, 0.15),
    "gpipe": Part(0.0, 0.05, signed=True),
    "zb_h1": Part(0.03, 0.08, signed=True),
    "other schedules": Part(0.03, 0.1, signed=True),
}
"""In this order."""


def features(candidate: Candidate, need: Need, job: Job) -> Array:
    """The quantities of :data:`PARTS`, each about 1 for a candidate that has much of it.

    Samples are those of all ranks: every mesh computes the same in all, spread over all ranks. Passes are relative to
    one sample at a time on a data rank; bytes to the states of one copy.
    """
    c = candidate
    share = max(1, job.batch // c.data)
    passes = c.accumulation
    scale = max(1, 16 * job.num_parameters)
    buckets = max(1.0, job.num_parameters / (c.bucket or 2**20))
    stages, ranks = c.pipe, c.pipe * c.tensor
    exposed = passes if c.stage == 3 else 1
    found = {
        "samples": 1.0,
        "small passes": 1.0 / c.micro,
        "large passes": math.log2(c.micro) / 4,
        "passes": passes / max(1, job.batch // job.ranks),
        "recomputation": float(c.checkpointing),
        "step": 1.0,
        "states": need.state_bytes / job.ranks / scale,
        "sent": need.wire_bytes / scale,
        "buckets": buckets * exposed / 4 if c.data > 1 else 0.0,
        "NVMe": need.nvme_bytes / scale,
        "gathers": passes / share if c.stage == 3 and c.data > 1 else 0.0,
        **{f"stage {n}": float(c.stage == n) for n in (1, 2, 3)},
        "tensor": 1.0 - 1.0 / c.tensor,
        "tensor passes": passes / share if c.tensor > 1 else 0.0,
        "bubble": (stages - 1) / passes / stages,
        "pipe passes": passes / share * ranks / job.ranks if stages > 1 else 0.0,
        "gpipe": float(c.schedule == "gpipe"),
        "zb_h1": float(c.schedule == "zb_h1"),
        "other schedules": float(c.schedule not in ("", "1f1b", "gpipe", "zb_h1")),
    }
    return np.array([found[name] for name in PARTS])


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and the standard deviation of what they may be."""

    seconds: float
    spread: float

    @property
    def hopeful(self) -> float:
        """What it takes if all goes well."""
        return max(0.0, self.seconds - self.spread)


@dataclass
class Model:
    """Predicts; :meth:`fit` it again after each trial.

    Attributes:
        extras: further settings of the configuration, path → JSON, each with a term of its own.
        residuals: of the trials it was fitted to: predicted / measured - 1.
    """

    job: Job
    needs: Mapping[Candidate, Need]
    extras: list[tuple[str, str]] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    _unit: float = 1.0
    _mean: Array | None = None
    _covariance: Array | None = None

    def __post_init__(self) -> None:
        self.extras = sorted({pair for candidate in self.needs for pair in candidate.extra})

    def _row(self, candidate: Candidate) -> Array:
        own = [float(pair in candidate.extra) for pair in self.extras]
        return np.concatenate([features(candidate, self.needs[candidate], self.job), own])

    @property
    def fitted(self) -> bool:
        """Whether there was a trial."""
        return self._mean is not None

    def fit(self, measured: Iterable[tuple[Candidate, float]]) -> None:
        """To seconds of a step, in the order in which they were measured; without any it knows nothing.

        Raises:
            ValueError: a step took no time, or one that is not finite.
        """
        trials = list(measured)
        for candidate, value in trials:
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"a step of {candidate.label()} took {value} s; it takes more than 0, and an end.")
        if not trials:
            return
        rows = np.array([self._row(candidate) for candidate, _ in trials])
        seconds = np.array([value for _, value in trials])
        unit = self._unit = float(seconds[0])
        parts = [*PARTS.values(), *(Part(0.0, 0.1, signed=True) for _ in self.extras)]
        mean = np.array([part.share for part in parts])
        mean *= 1.0 / max(1e-9, float(rows[0] @ mean))  # the first trial's time is what they add up to
        spread = np.array([part.spread for part in parts])
        relative = np.minimum(seconds, MOST * unit) / unit
        weight = 1.0 / np.maximum(relative, LEAST) / NOISE
        scaled, target = rows * weight[:, None], relative * weight
        free = np.ones(len(parts), dtype=bool)
        signed = np.array([part.signed for part in parts])
        found = np.zeros(len(parts))
        while True:  # weights that would be negative are 0
            inverse = np.diag(1.0 / spread[free] ** 2) + scaled[:, free].T @ scaled[:, free]
            covariance = np.linalg.inv(inverse)
            found[:] = 0.0
            found[free] = covariance @ (mean[free] / spread[free] ** 2 + scaled[:, free].T @ target)
            wrong = free & ~signed & (found < 0)
            if not wrong.any():
                break
            free &= ~wrong
        whole = np.diag(spread**2) * 0.25  # of those that are 0, what they may be after all
        whole[np.ix_(free, free)] = covariance
        self._mean, self._covariance = found * unit, whole * unit**2
        self.residuals = [float(r @ self._mean / s - 1) for r, s in zip(rows, seconds, strict=True)]

    def predict(self, candidate: Candidate) -> Prediction:
        """Seconds of a step.

        Raises:
            AssertionError: it was fitted to nothing.
        """
        if self._mean is None or self._covariance is None:
            raise AssertionError("a prediction needs at least one trial.")
        row = self._row(candidate)
        seconds = max(float(row @ self._mean), 0.01 * self._unit)  # a line knows no zero
        return Prediction(seconds, math.sqrt(max(0.0, float(row @ self._covariance @ row))))
