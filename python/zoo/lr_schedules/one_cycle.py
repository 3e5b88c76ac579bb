"""One cycle of learning rate and momentum, then decay."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from zoo.lr_schedules.schedule import Rates, Schedule, check_numbers, for_groups, of_group

_log = logging.getLogger("zoo.lr_schedules")


class OneCycle(Schedule):
    """The rate rises from min to max over a steps, falls back over b, and then decays; momentum does the reverse.

    With a = ``cycle_first_step_size``, b = ``cycle_second_step_size`` (a if not given; with 0 it is over at k = a) and
    the height
    h(k) = k / a for k <= a, (a + b - k) / b for k <= a + b: ``lr = min + (max - min) * h``, momentum
    ``max_mom - (max_mom - min_mom) * h``, but ``min_mom`` in the very first step. With s stairs in a half, h there is
    rounded down to a multiple of 1 / s. After the cycle, with i = (k - a - b) / ``decay_step_size``:
    ``lr = min / (1 + decay_lr_rate * i)``, momentum ``max_mom * (1 + decay_mom_rate * i)``; a ``decay_step_size`` of 0
    is no decay. The optimizer's own rate and momentum (``betas[0]``, or ``momentum``) are replaced.
    Smith 2018, "A disciplined approach to neural network hyper-parameters: Part 1" (arXiv:1803.09820), sections 4
    and 5.
    """

    @dataclass(frozen=True)
    class Config:
        """Rates and momenta are one number, or one for each parameter group. ``cycle_second_stair_count``: that of the
        first half if not given."""

        cycle_min_lr: Rates
        cycle_max_lr: Rates
        decay_lr_rate: float = 0.0
        cycle_first_step_size: int = 2000
        cycle_second_step_size: int | None = None
        cycle_first_stair_count: int = 0
        cycle_second_stair_count: int | None = None
        decay_step_size: int = 0
        cycle_momentum: bool = True
        cycle_min_mom: Rates = 0.8
        cycle_max_mom: Rates = 0.9
        decay_mom_rate: float = 0.0

        def __post_init__(self) -> None:
            check_numbers("OneCycle", self)
            for key, least in (
                ("cycle_first_step_size", 1), ("cycle_second_step_size", 0), ("decay_step_size", 0),
                ("cycle_first_stair_count", 0), ("cycle_second_stair_count", 0),
                ("decay_lr_rate", 0), ("decay_mom_rate", 0),
            ):  # fmt: skip
                value = getattr(self, key)
                if value is not None and value < least:
                    raise ValueError(f"OneCycle got {key}={value}; it must be at least {least}.")

    config: Config
    per_group = ("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom")

    def check_optimizer(self) -> None:
        """Say so where there is no momentum to cycle."""
        if self.config.cycle_momentum and not all(self._has_momentum(g) for g in self.optimizer.param_groups):
            _log.warning(
                "OneCycle cycles the learning rate only: groups of %s have neither betas nor momentum. "
                "cycle_momentum=False says that this is meant.", type(self.optimizer).__name__,
            )  # fmt: skip

    @staticmethod
    def _has_momentum(group: dict[str, Any]) -> bool:
        return "betas" in group or "momentum" in group

    def rate(self, step: int, group: int) -> float:
        """The formula of the class."""
        config = self.config
        low, high = of_group(config.cycle_min_lr, group), of_group(config.cycle_max_lr, group)
        after = self._intervals_after(step)
        return low + (high - low) * self._height(step) if after is None else low / (1.0 + config.decay_lr_rate * after)

    def momentum(self, step: int, group: int) -> float:
        """The momentum of step ``step`` for a group."""
        config = self.config
        low, high = of_group(config.cycle_min_mom, group), of_group(config.cycle_max_mom, group)
        return low if step == 0 else self._momentum(step, low, high)

    def _momentum(self, step: int, low: float, high: float) -> float:
        after = self._intervals_after(step)
        if after is None:
            return high - (high - low) * self._height(step)
        return high * (1.0 + self.config.decay_mom_rate * after)

    def get_mom(self) -> list[Any] | None:
        """For each group what the formula gives at this step for its ``betas`` or ``momentum`` (also in the very first
        one, where the group has ``min_mom``); None without ``cycle_momentum``."""
        if not self.config.cycle_momentum:
            return None
        found = list[Any]()
        for index, group in enumerate(self.optimizer.param_groups):
            of = [of_group(rates, index) for rates in (self.config.cycle_min_mom, self.config.cycle_max_mom)]
            momentum = self._momentum(self.last_step, *of)
            found.append((momentum, *group["betas"][1:]) if "betas" in group else momentum)
        return found

    @property
    def min_lrs(self) -> list[float]:
        """min of each parameter group."""
        return for_groups(self.config.cycle_min_lr, len(self.base_rates))

    @property
    def max_lrs(self) -> list[float]:
        """max of each parameter group."""
        return for_groups(self.config.cycle_max_lr, len(self.base_rates))

    def values(self, step: int, group: int) -> dict[str, Any]:
        """Rate, and momentum where the group has one."""
        found = super().values(step, group)
        options = self.optimizer.param_groups[group]
        if self.config.cycle_momentum and self._has_momentum(options):
            momentum = self.momentum(step, group)
            if "betas" in options:
                found["betas"] = (momentum, *options["betas"][1:])
            else:
                found["momentum"] = momentum
        return found

    def _sizes(self) -> tuple[int, int]:
        first, second = self.config.cycle_first_step_size, self.config.cycle_second_step_size
        return first, first if second is None else second

    def _intervals_after(self, step: int) -> float | None:
        """Intervals of decay since the end of the cycle; None within it."""
        past, second = step - sum(self._sizes()), self._sizes()[1]
        if past < 0 or (past == 0 and second):
            return None
        return past / self.config.decay_step_size if self.config.decay_step_size else 0.0

    def _height(self, step: int) -> float:
        first, second = self._sizes()
        up = step <= first
        done, size = (step, first) if up else (first + second - step, second)
        stairs, others = self.config.cycle_first_stair_count, self.config.cycle_second_stair_count
        stairs = stairs if up or others is None else others
        return done * stairs // size / stairs if stairs else done / size
