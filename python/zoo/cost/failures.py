"""What failures cost: how often to write a checkpoint, and how much of the time is progress."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Goodput", "goodput"]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Of a long job.

    Attributes:
        interval_s: between checkpoints. part: of the time that is progress. failures_per_day: of the whole job.
    """

    interval_s: float
    part: float
    failures_per_day: float


def goodput(*, ranks: int, hours_between_failures: float, checkpoint_s: float, restart_s: float) -> Goodput:
    """The interval with the most progress, and that progress.

    With M seconds between failures of the whole job (those of one rank over the ranks), checkpoints that stop training
    for δ and restarts that take R, the interval is ``τ = √(2 δ M) - δ`` (Daly 2006, "A higher order estimate of the
    optimum checkpoint interval", first order; Young 1974 without the last term), and lost is, a second::

        δ / (τ + δ) + (R + (τ + δ) / 2) / M

    Args:
        hours_between_failures: of one rank. checkpoint_s: 0 where they are written beside training.

    Raises:
        ValueError: a number below 0; no time between failures, or one without end.
    """
    for name, value in (("checkpoint_s", checkpoint_s), ("restart_s", restart_s)):
        if not 0 <= value < math.inf:
            raise ValueError(f"goodput got {name}={value}; it is a number of at least 0.")
    between = 3600 * hours_between_failures / ranks if ranks >= 1 else 0.0
    if not 0 < between < math.inf:
        raise ValueError(
            f"goodput got ranks={ranks} and hours_between_failures={hours_between_failures}; both are above 0, and no "
            "number is infinite."
        )
    interval = max(math.sqrt(2 * checkpoint_s * between) - checkpoint_s, 0.0)
    whole = interval + checkpoint_s
    lost = (checkpoint_s / whole if whole else 0.0) + (restart_s + whole / 2) / between
    return Goodput(interval_s=interval, part=max(1 - lost, 0.0), failures_per_day=86_400 / between)
