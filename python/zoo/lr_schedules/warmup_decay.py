"""Warm up, then fall in a straight line."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules.schedule import (
    HasParamGroups,
    Schedule,
    check_groups,
    check_total,
    check_warmup,
    per_group,
    ramp,
)


class WarmupDecayLR(Schedule):
    """``lr(k) = min + (max - min) * g(k)`` with n = ``warmup_num_steps``, N = ``total_num_steps``.

    g(k) is the ramp of :class:`~zoo.lr_schedules.WarmupLR` for k < n, then ``max(0, (N - k) / max(1, N - n))``. The
    optimizer's own learning rate is replaced.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """``warmup_min_lr`` and ``warmup_max_lr`` are one number, or one for each parameter group."""

        total_num_steps: int
        warmup_min_lr: float | list[float] = 0.0
        warmup_max_lr: float | list[float] = 0.001
        warmup_num_steps: int = 1000
        warmup_type: str = "log"

        def __post_init__(self) -> None:
            check_warmup("WarmupDecayLR", self.warmup_num_steps, self.warmup_type)
            check_total("WarmupDecayLR", self.total_num_steps)

    def __init__(self, config: Config, *, optimizer: HasParamGroups) -> None:
        self.config = config
        for key in ("warmup_min_lr", "warmup_max_lr"):
            check_groups(type(self).__name__, key, getattr(config, key), len(optimizer.param_groups))
        super().__init__(optimizer)

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        config = self.config
        low, high = per_group(config.warmup_min_lr, group), per_group(config.warmup_max_lr, group)
        if step < config.warmup_num_steps:
            share = ramp(step, config.warmup_num_steps, config.warmup_type)
        else:
            share = max(0.0, (config.total_num_steps - step) / max(1, config.total_num_steps - config.warmup_num_steps))
        return low + (high - low) * share
