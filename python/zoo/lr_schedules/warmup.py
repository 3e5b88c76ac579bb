"""Warm up, then stay."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules.schedule import HasParamGroups, Schedule, check_groups, check_warmup, per_group, ramp


class WarmupLR(Schedule):
    """``lr(k) = min + (max - min) * r(k)`` with the ramp r from 0 to 1 over ``warmup_num_steps``, 1 after it.

    r(k) = ln(k + 1) / ln(warmup_num_steps) for "log", k / warmup_num_steps for "linear". The optimizer's own learning
    rate is replaced.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """``warmup_min_lr`` and ``warmup_max_lr`` are one number, or one for each parameter group."""

        warmup_min_lr: float | list[float] = 0.0
        warmup_max_lr: float | list[float] = 0.001
        warmup_num_steps: int = 1000
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupLR", self.warmup_num_steps, self.warmup_type)

    def __init__(self, config: Config, *, optimizer: HasParamGroups) -> None:
        self.config = config
        for key in ("warmup_min_lr", "warmup_max_lr"):
            check_groups(type(self).__name__, key, getattr(config, key), len(optimizer.param_groups))
        super().__init__(optimizer)

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        low = per_group(self.config.warmup_min_lr, group)
        high = per_group(self.config.warmup_max_lr, group)
        return low + (high - low) * ramp(step, self.config.warmup_num_steps, self.config.warmup_type)
