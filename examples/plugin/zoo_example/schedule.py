"""Warm up, then fall with the root of the step."""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules import Schedule


class InverseSqrt(Schedule):
    """rate(k) = base · min((k + 1) / n, √(n / (k + 1))), n = ``warmup_num_steps``: Vaswani et al. 2017, section 5.3.

    The optimizer's own learning rate is the highest rate, which step n - 1 has.
    """

    @dataclass(frozen=True)
    class Config:
        """``warmup_num_steps``: n, at least 1."""

        warmup_num_steps: int = 100

        def __post_init__(self) -> None:
            if self.warmup_num_steps < 1:
                raise ValueError(f"InverseSqrt got warmup_num_steps={self.warmup_num_steps}; it is at least 1.")

    config: Config

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        n = self.config.warmup_num_steps
        return self.base_rates[group] * min((step + 1) / n, (n / (step + 1)) ** 0.5)
