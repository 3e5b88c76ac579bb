"""What all schedules share: the count of steps, the optimizer's groups, state, and the warm-up ramp."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class HasParamGroups(Protocol):
    """What a schedule needs of an optimizer: the list of its groups, each a dict with the key "lr"."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; the schedule writes ``group["lr"]``."""


class Schedule:
    """A learning rate for each step k = 0, 1, 2, …: step k (counted from 0) is taken with ``rate(k, group)``.

    The rate of step 0 is set when the schedule is built; :meth:`step`, called after each optimizer step, sets the next
    one. A subclass defines :meth:`rate`, a pure function of k, so that resuming is nothing but setting k.

    Attributes:
        base_rates: the learning rates the groups had when the schedule was built.
        last_step: k of the rate that the groups have now.
    """

    def __init__(self, optimizer: HasParamGroups) -> None:
        self.optimizer = optimizer
        self.base_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_step = 0
        self._apply()

    def rate(self, step: int, group: int) -> float:
        """The learning rate of step ``step`` (from 0) for parameter group number ``group``."""
        raise NotImplementedError(f"{type(self).__name__} defines no rate(step, group).")

    def step(self) -> None:
        """Go on to the rate of the next step."""
        self.last_step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The rate of each group as it is now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """All there is to save: where the schedule stands and what it multiplies."""
        return {"last_step": self.last_step, "base_rates": list(self.base_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; the groups get the rate of that step.

        Raises:
            ValueError: the state is of an optimizer with another number of groups, or of another kind of schedule.
        """
        if set(state) != {"last_step", "base_rates"}:
            raise ValueError(
                f"{type(self).__name__} got a state with the keys {sorted(state)}; it wants base_rates and last_step, "
                f"as "
                "its own state_dict() gives them."
            )
        if len(state["base_rates"]) != len(self.base_rates):
            raise ValueError(
                f"{type(self).__name__} got the state of {len(state['base_rates'])} parameter groups; the optimizer "
                f"has "
                f"{len(self.base_rates)}. Build it with the same groups as when the state was saved."
            )
        self.last_step = int(state["last_step"])
        self.base_rates = [float(rate) for rate in state["base_rates"]]
        self._apply()

    def _apply(self) -> None:
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.rate(self.last_step, index)


def ramp(step: int, num_steps: int, kind: str) -> float:
    """From 0 at step 0 up to 1 at step ``num_steps`` and after it.

    "linear": ``k / n``. "log": ``ln(k + 1) / ln(n)``, at most 1 (it gets there at k = n - 1), with n at
    least 2.
    """
    if step >= num_steps:
        return 1.0
    if kind == "linear":
        return step / num_steps
    return min(1.0, math.log(step + 1) / math.log(max(2, num_steps)))


def per_group(value: float | Sequence[float], group: int) -> float:
    """``value`` itself, or its element for the group."""
    return float(value if isinstance(value, (int, float)) else value[group])


def check_warmup(name: str, warmup_num_steps: int, warmup_type: str) -> None:
    """Raise ValueError for a ramp that cannot be."""
    if warmup_type not in ("log", "linear"):
        raise ValueError(f"{name} got warmup_type={warmup_type!r}; allowed are 'log' and 'linear'.")
    if warmup_num_steps < 0:
        raise ValueError(f"{name} got warmup_num_steps={warmup_num_steps}; give 0 (no warm-up) or more steps.")


def check_total(name: str, total_num_steps: int) -> None:
    """Raise ValueError for a run without steps. One that is shorter than its warm-up ends on the ramp."""
    if total_num_steps < 1:
        raise ValueError(f"{name} got total_num_steps={total_num_steps}; it must be at least 1.")


def check_groups(name: str, key: str, value: float | Sequence[float], num_groups: int) -> None:
    """Raise ValueError for a list of values that is not one per parameter group."""
    if not isinstance(value, (int, float)) and len(value) != num_groups:
        raise ValueError(
            f"{name} got {len(value)} values for {key}; the optimizer has {num_groups} parameter groups: give one "
            f"value for "
            "all or one for each."
        )
