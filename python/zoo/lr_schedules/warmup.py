"""Warm up and stay there."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules.schedule import Rates, WarmupSchedule, check_numbers, check_warmup, for_groups, of_group, ramp


class WarmupLR(WarmupSchedule):
    """``lr(k) = min + (max - min) * r(k)`` with the ramp r from 0 to 1 over n = ``warmup_num_steps``, 1 after it.

    r(k) = ln(k) / ln(n) for "log", (k - 1) / n for "linear", and 0 for k = 0: the first two steps are taken at the
    minimum, as the field's own schedule does. n is at least 2. The optimizer's own learning rate is replaced, or is
    the maximum where none is given.
    Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2.
    """

    @dataclass(frozen=True)
    class Config:
        """``warmup_min_lr`` and ``warmup_max_lr`` are one number, or one for each parameter group; no maximum (null):
        the optimizer's own rate. (DeepSpeed's documents have 0.001 there; DeepSpeed 0.19.8 does as this.)"""

        warmup_min_lr: Rates = 0.0
        warmup_max_lr: Rates | None = None
        warmup_num_steps: int = 1000
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupLR", self.warmup_num_steps, self.warmup_type)
            check_numbers("WarmupLR", self)

    config: Config
    per_group = ("warmup_min_lr", "warmup_max_lr")

    @property
    def min_lrs(self) -> list[float]:
        """min of each parameter group."""
        return for_groups(self.config.warmup_min_lr, len(self.base_rates))

    @property
    def max_lrs(self) -> list[float]:
        """max of each parameter group."""
        top = self.config.warmup_max_lr
        return list(self.base_rates) if top is None else for_groups(top, len(self.base_rates))

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        low, top = of_group(self.config.warmup_min_lr, group), self.config.warmup_max_lr
        high = self.base_rates[group] if top is None else of_group(top, group)
        return low + (high - low) * ramp(step, self.config.warmup_num_steps, self.config.warmup_type)
