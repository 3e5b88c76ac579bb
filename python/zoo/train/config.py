"""The ``train`` section: what the job does around the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from zoo.config import ComponentChoice, ConfigError, Section, read

if TYPE_CHECKING:
    from zoo.config import Config

STEPS_OF_SCHEDULE = "scheduler.params.total_num_steps"


class TaskChoice(ComponentChoice):
    """Which task, such as "byte_lm", and its options."""

    kind: ClassVar[str] = "task"
    runtime: ClassVar[tuple[str, ...]] = ("seed",)


class TrainConfig(Section):
    """What ``zoo train`` does: the task, how long, how often it looks up, and where it writes."""

    carried_by: ClassVar[str] = "zoo.train"

    task: TaskChoice
    steps: int = Field(gt=0)
    """Optimizer steps."""
    out: str = "runs/train"
    """Directory of logs, picture and checkpoints, from where the command runs."""
    validate_every: int | None = Field(default=100, gt=0)
    """Steps between validations; null for one at the end only."""
    checkpoint_every: int | None = Field(default=None, gt=0)
    """Steps between checkpoints; null for one at the end only."""
    threads: int | None = Field(default=None, gt=0)
    """Threads of each rank; null for the processor's cores divided by the ranks on it, at least one."""


def read_config(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """A configuration with a ``train`` section, for the ranks that the environment names.

    A schedule whose ``total_num_steps`` is "auto" gets ``train.steps``.

    Raises:
        ConfigError: everything that is wrong with it.
        FileNotFoundError: no such file.
    """
    document = read(source, overrides=tuple(overrides))
    section = document.values.get("train")
    if not isinstance(section, Mapping):
        raise ConfigError(
            ['train: missing; say what to train, such as {"task": {"type": "byte_lm"}, "steps": 100}'], document.where
        )
    if STEPS_OF_SCHEDULE in document.auto_paths() and section.get("steps") is not None:
        document = document.resolve_auto({STEPS_OF_SCHEDULE: section["steps"]})
    return document.load()
