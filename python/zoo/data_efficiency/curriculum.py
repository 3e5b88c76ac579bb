"""Curriculum learning by the length of sequences: the engine part ``curriculum_learning``."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

from torch import nn

from zoo.data_efficiency.config import CurriculumConfig, Difficulty
from zoo.data_efficiency.schedules import Schedule, build_schedule, checked
from zoo.data_efficiency.sequence import Cutter
from zoo.parts import Clock, Environment

ARGUMENT = "curriculum_seqlen"
_log = logging.getLogger("zoo.data_efficiency")


class Growing:
    """The difficulty of a section at any step, a function of the step alone."""

    def __init__(self, section: Difficulty, where: str) -> None:
        self.section, self.where = section, where
        self.low, self.high = section.min_difficulty, section.max_difficulty
        self._schedule = build_schedule(section.schedule_type, section.schedule_config, low=self.low, high=self.high)
        self.custom = self._schedule is None

    def set_schedule(self, schedule: Schedule) -> None:
        """A function step → difficulty, where the configuration says "custom"; the first step is 1."""
        if not self.custom:
            raise ValueError(
                f"{self.where}.schedule_type is {self.section.schedule_type!r}; set_schedule() is for "
                '"schedule_type": "custom".'
            )
        if not callable(schedule):
            raise ValueError(f"set_schedule got {schedule!r}; it takes a function step → difficulty.")
        self._schedule = schedule

    def at(self, step: int) -> int:
        """The difficulty of a step; the first is 1."""
        if self._schedule is None:
            raise ValueError(
                f'{self.where}.schedule_type is "custom", and no schedule is set; call set_schedule() of '
                f"engine.parts[{self.where.split('.')[0]!r}] before training."
            )
        value = self._schedule(step)
        return checked(value, self.low, self.high, step) if self.custom else value


class CurriculumLearning:
    """Sequences that grow with training: at step t (the first is 1) they have at most ``schedule(t)`` elements.

    Li, Zhang, He 2022, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
    Models", section 4. Batches of training are cut, or the model cuts them; evaluation sees whole sequences. The length
    is a function of the step, so it is the same on all ranks, and checkpoints need nothing of it.

    Args:
        section: ``curriculum_learning``.
        environment: of the engine.
    """

    def __init__(self, section: CurriculumConfig, environment: Environment) -> None:
        self.section = section
        self.growing = Growing(section, "curriculum_learning")
        self._cutter = Cutter(section.sequence_dim, section.tensors)
        self._how: Literal["truncate", "reshape", "argument"] = "truncate"
        if section.apply != "auto":
            self._how = section.apply
        self._length: int | None = None

    def set_schedule(self, schedule: Schedule) -> None:
        """See :meth:`Growing.set_schedule`."""
        self.growing.set_schedule(schedule)

    def prepare(self, module: nn.Module, mesh: Any) -> None:
        """Look whether the model takes the length itself."""
        if self.section.apply == "auto" and takes(module, (ARGUMENT,)):
            self._how = "argument"
            _log.info("curriculum learning: %s takes %s and cuts sequences itself", type(module).__name__, ARGUMENT)

    def on_batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], clock: Clock
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with shorter sequences, or with the length as ``curriculum_seqlen``."""
        self._length = self.growing.at(clock.step + 1)
        if self._how == "argument":
            return args, {**kwargs, ARGUMENT: self._length}
        cut = self._cutter.truncate if self._how == "truncate" else self._cutter.reshape
        return cut(args, kwargs, self._length)

    def metrics(self) -> dict[str, float]:
        """The length that the step's sequences had at most."""
        return {} if self._length is None else {"seqlen": float(self._length)}


def takes(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether the module's forward has parameters of these names."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return False
    return all(name in parameters for name in names)
