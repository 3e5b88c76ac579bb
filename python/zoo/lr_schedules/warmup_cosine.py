"""Warm up, then fall along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zoo.lr_schedules.schedule import Rates, WarmupSchedule, check_numbers, check_total, check_warmup, of_group, ramp


class WarmupCosineLR(WarmupSchedule):
    """``lr(k) = base * f(k)`` with the optimizer's own learning rate as base, n = ``warmup_num_steps`` (at least 2),
    N = ``total_num_steps``.

    f(0) = 0. For k <= n: ``f = w + (1 - w) * r(k)``, w = ``warmup_min_ratio``, r the ramp of
    :class:`~zoo.lr_schedules.WarmupLR`. Then ``f = c + (1 - c) * (1 + cos(pi * (k - n) / (N - n))) / 2`` with
    c = ``cos_min_ratio``, and f = c from k = N on. That the first step moves nothing is what the field's own schedule
    does. Loshchilov and Hutter 2017, "SGDR", equation 5, one cycle.
    """

    @dataclass(frozen=True)
    class Config:
        """Ratios are of the optimizer's learning rate; ``warmup_min_ratio`` is one number, or one for each parameter
        group."""

        total_num_steps: int
        warmup_min_ratio: Rates = 0.0
        warmup_num_steps: int = 1000
        cos_min_ratio: float = 0.0001
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupCosineLR", self.warmup_num_steps, self.warmup_type)
            check_numbers("WarmupCosineLR", self)
            check_total("WarmupCosineLR", self.total_num_steps)
            for key in ("warmup_min_ratio", "cos_min_ratio"):
                value = getattr(self, key)
                if not all(0.0 <= ratio <= 1.0 for ratio in (value if isinstance(value, (list, tuple)) else [value])):
                    raise ValueError(f"WarmupCosineLR got {key}={value}; it lies between 0 and 1.")

    config: Config
    per_group = ("warmup_min_ratio",)

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        return self.base_rates[group] * self._ratio(step, group)

    @property
    def cos_min_ratio(self) -> float:
        """c."""
        return self.config.cos_min_ratio

    @property
    def warmup_min_ratio(self) -> Rates:
        """w."""
        return self.config.warmup_min_ratio

    @property
    def org_lrs(self) -> list[float]:
        """base of each parameter group."""
        return list(self.base_rates)

    def get_lr_ratio(self) -> float:
        """f at this step, of the first parameter group."""
        return self._ratio(self.last_step, 0)

    def _ratio(self, step: int, group: int) -> float:
        config = self.config
        if step == 0:
            return 0.0
        warmup = max(2, config.warmup_num_steps)
        if step <= warmup:
            low = of_group(config.warmup_min_ratio, group)
            return low + (1.0 - low) * ramp(step, warmup, config.warmup_type)
        done = min(1.0, (step - warmup) / max(1, config.total_num_steps - warmup))
        return config.cos_min_ratio + (1.0 - config.cos_min_ratio) * 0.5 * (1.0 + math.cos(math.pi * done))
