"""Where training stands, and what a step came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def _none() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Clock:
    """The same on all ranks. What depends on progress depends on this, so that ranks and pipeline stages agree.

    Counted is what was before now: in the first step ``step`` is 0.
    """

    step: int = 0
    """Steps that are over, skipped ones included."""
    micro_batch: int = 0
    """Micro-batches of this step that are over, on one rank."""
    samples: int = 0
    """Samples of all ranks in steps that are over."""
    tokens: int = 0
    """Tokens of all ranks in steps that are over; 0 where batches have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """Numbers of one step: sums and means over ranks are the same on all of them, the rest are this rank's.

    To read one costs nothing and starts no collective.
    """

    step: int
    """Of this step; the first is 1."""
    loss: float | None
    """Mean over micro-batches and ranks; None where no loss went through the engine."""
    lr: tuple[float, ...]
    """The learning rate that each parameter group was updated with."""
    grad_norm: float | None
    """Of the mean gradient before clipping; None where the optimizer does not measure it."""
    skipped: bool = False
    """Nothing was updated, because the gradient was not finite."""
    loss_scale: float = 1.0
    """What the loss was multiplied by."""
    samples: int = 0
    """Of this step, all ranks."""
    tokens: int = 0
    """Of this step, all ranks; 0 where batches have none."""
    total_samples: int = 0
    """Since training began, this step included."""
    total_tokens: int = 0
    """Since training began, this step included."""
    step_s: float = 0.0
    """Seconds from the end of the step before (of its first forward, in the first) to the end of this one; this
    rank's. Where steps are not waited for, from one launch to the next."""
    wire_bytes: int = 0
    """What this rank has sent for the step."""
    memory_bytes: int | None = None
    """Of model states on this rank after the step; None where the engine was not asked to measure it."""
    stop: bool = False
    """Some rank wants training to stop."""
    metrics: Mapping[str, float] = field(default_factory=_none)
    """What parts and users add, each under "<who>/<what>"."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, all ranks."""
        return self.tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples a second, all ranks."""
        return self.samples / self.step_s if self.step_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, metrics by their own names beside the rest."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "metrics"}
        return {**found, "lr": list(self.lr), **self.metrics}
