"""Warm up, then fall in a straight line."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules.schedule import (
    Rates,
    WarmupSchedule,
    check_numbers,
    check_total,
    check_warmup,
    for_groups,
    of_group,
    ramp,
)


class WarmupDecayLR(WarmupSchedule):
    """``lr(k) = min + (max - min) * g(k)`` with n = ``warmup_num_steps`` (at least 2), N = ``total_num_steps``.

    g(k) is the ramp of :class:`~zoo.lr_schedules.WarmupLR` for k <= n, then ``max(0, (N - k + 1) / max(1, N - n))``:
    the last rate above the minimum is that of step k = N. The optimizer's own learning rate is replaced.
    """

    @dataclass(frozen=True)
    class Config:
        """``warmup_min_lr`` and ``warmup_max_lr`` are one number, or one for each parameter group."""

        total_num_steps: int
        warmup_min_lr: Rates = 0.0
        warmup_max_lr: Rates = 0.001
        warmup_num_steps: int = 1000
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupDecayLR", self.warmup_num_steps, self.warmup_type)
            check_numbers("WarmupDecayLR", self)
            check_total("WarmupDecayLR", self.total_num_steps)

    config: Config
    per_group = ("warmup_min_lr", "warmup_max_lr")

    @property
    def min_lrs(self) -> list[float]:
        """min of each parameter group."""
        return for_groups(self.config.warmup_min_lr, len(self.base_rates))

    @property
    def max_lrs(self) -> list[float]:
        """max of each parameter group."""
        return for_groups(self.config.warmup_max_lr, len(self.base_rates))

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        config = self.config
        low, high = of_group(config.warmup_min_lr, group), of_group(config.warmup_max_lr, group)
        warmup, total = max(2, config.warmup_num_steps), config.total_num_steps
        if step <= warmup:
            share = ramp(step, warmup, config.warmup_type)
        else:
            share = max(0.0, (total - step + 1) / max(1, total - warmup))
        return low + (high - low) * share
