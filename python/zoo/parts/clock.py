"""Where training stands."""

from __future__ import annotations

from dataclasses import dataclass


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
