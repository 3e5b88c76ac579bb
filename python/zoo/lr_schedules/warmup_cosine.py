"""Warm up, then fall along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zoo.lr_schedules.schedule import HasParamGroups, Schedule, check_total, check_warmup, ramp


class WarmupCosineLR(Schedule):
    """``lr(k) = base * f(k)`` with the optimizer's own learning rate as base, n = ``warmup_num_steps``, N =
    ``total_num_steps``.

    For k < n: ``f = w + (1 - w) * r(k)``, w = ``warmup_min_ratio``, r the ramp of :class:`~zoo.lr_schedules.WarmupLR`.
    Then ``f = c + (1 - c) * (1 + cos(pi * (k - n + 1) / (N - n))) / 2`` with c = ``cos_min_ratio``, and f = c from step
    N - 1 on: the field's own schedule lets the cosine rise again after the end, this one stays down.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Ratios are of the optimizer's learning rate."""

        total_num_steps: int
        warmup_min_ratio: float = 0.0
        warmup_num_steps: int = 1000
        cos_min_ratio: float = 0.0001
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupCosineLR", self.warmup_num_steps, self.warmup_type)
            check_total("WarmupCosineLR", self.total_num_steps)
            for key in ("warmup_min_ratio", "cos_min_ratio"):
                if not 0.0 <= getattr(self, key) <= 1.0:
                    raise ValueError(f"WarmupCosineLR got {key}={getattr(self, key)}; it lies between 0 and 1.")

    def __init__(self, config: Config, *, optimizer: HasParamGroups) -> None:
        self.config = config
        super().__init__(optimizer)

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        config = self.config
        if step < config.warmup_num_steps:
            low = config.warmup_min_ratio
            return self.base_rates[group] * (
                low + (1.0 - low) * ramp(step, config.warmup_num_steps, config.warmup_type)
            )
        span = max(1, config.total_num_steps - config.warmup_num_steps)
        done = min(1.0, (step - config.warmup_num_steps + 1) / span)
        low = config.cos_min_ratio
        return self.base_rates[group] * (low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * done)))
