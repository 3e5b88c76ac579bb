"""``deepspeed.runtime.data_pipeline.curriculum_scheduler``: the schedules of ``zoo.data_efficiency`` by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zoo.data_efficiency.schedules import CUSTOM, build_schedule, checked

_ASKED = ("schedule_type", "min_difficulty", "max_difficulty")


class CurriculumScheduler:
    """How difficult samples are at a step, as the keys of a curriculum say.

    Attributes:
        state: "current_difficulty", and the keys that were given.

    Raises:
        ValueError: what is wrong with the keys.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        missing = [key for key in _ASKED if key not in config]
        if missing:
            raise ValueError(f"CurriculumScheduler: {missing[0]!r} is missing; needed are {', '.join(_ASKED)}.")
        low, high, kind = config["min_difficulty"], config["max_difficulty"], config["schedule_type"]
        self._schedule = build_schedule(kind, config.get("schedule_config", {}), low=low, high=high)
        self.state = {**{key: config[key] for key in _ASKED}, "current_difficulty": low}
        if "schedule_config" in config:
            self.state["schedule_config"] = dict(config["schedule_config"])

    def set_custom_get_difficulty(self, schedule_function: Callable[[int], int]) -> None:
        """With ``schedule_type`` "custom": the step → the difficulty."""
        if self.state["schedule_type"] != CUSTOM:
            raise ValueError(
                f"set_custom_get_difficulty: schedule_type is {self.state['schedule_type']!r}; say {CUSTOM!r} there."
            )
        self._schedule = schedule_function

    def get_difficulty(self, global_steps: int) -> int:
        """The difficulty at a step.

        Raises:
            ValueError: no custom schedule was set, or it gives what is not within the limits.
        """
        if self._schedule is None:
            raise ValueError("schedule_type is 'custom' and there is no schedule; call set_custom_get_difficulty().")
        low, high = self.state["min_difficulty"], self.state["max_difficulty"]
        return checked(self._schedule(global_steps), low, high, global_steps)

    def update_difficulty(self, global_steps: int) -> int:
        """Let the current difficulty be that of a step, unless it is the highest already; the current one."""
        if self.state["current_difficulty"] < self.state["max_difficulty"]:
            self.state["current_difficulty"] = self.get_difficulty(global_steps)
        return int(self.state["current_difficulty"])
