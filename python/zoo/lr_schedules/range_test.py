"""Raise the learning rate until training diverges: which rates does a model bear?"""

from __future__ import annotations

from dataclasses import dataclass

from zoo.lr_schedules.schedule import Rates, Schedule, check_numbers, of_group


class LRRangeTest(Schedule):
    """``lr(k) = min * (1 + rate * i(k))`` with i(k) = k / n, or its whole part as a staircase.

    min = ``lr_range_test_min_lr``, rate = ``lr_range_test_step_rate``, n = ``lr_range_test_step_size`` steps. The
    optimizer's own learning rate is replaced. Smith 2018, "A disciplined approach to neural network hyper-parameters:
    Part 1" (arXiv:1803.09820), section 4.1.
    """

    @dataclass(frozen=True)
    class Config:
        """``lr_range_test_min_lr`` is one number, or one for each parameter group."""

        lr_range_test_min_lr: Rates = 0.001
        lr_range_test_step_size: int = 2000
        lr_range_test_step_rate: float = 1.0
        lr_range_test_staircase: bool = False

        def __post_init__(self) -> None:
            check_numbers("LRRangeTest", self)
            if self.lr_range_test_step_size < 1:
                raise ValueError(
                    f"LRRangeTest got lr_range_test_step_size={self.lr_range_test_step_size}; give 1 or more steps."
                )

    config: Config
    per_group = ("lr_range_test_min_lr",)

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        config = self.config
        size = config.lr_range_test_step_size
        interval = step // size if config.lr_range_test_staircase else step / size
        return of_group(config.lr_range_test_min_lr, group) * (1.0 + config.lr_range_test_step_rate * interval)
