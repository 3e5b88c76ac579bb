"""The ``train`` section: what the job does around the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from zoo.config import ComponentChoice, ConfigError, Section, read
from zoo.registry import DEFAULT, Registry

if TYPE_CHECKING:
    from zoo.config import Config
    from zoo.config.document import Document

STEPS_OF_SCHEDULE = "scheduler.params.total_num_steps"


class TaskChoice(ComponentChoice):
    """Which task, such as "byte_lm", and its options."""

    kind: ClassVar[str] = "task"
    runtime: ClassVar[tuple[str, ...]] = ("seed",)


class WarmStart(Section):
    """Weights that training begins with, instead of the task's own."""

    path: str
    """A .safetensors file, a directory of checkpoints (its latest is taken), or one checkpoint in it."""
    key_map: dict[str, str] = Field(default_factory=dict)
    """Regular expression → replacement, applied in this order to each name in the file: "^model\\\\." → ""."""
    resized: list[str] = Field(default_factory=list)
    """Regular expressions of parameters whose first dimension may be another one, as that of a vocabulary: rows that
    both have are taken, further ones stay as the task made them."""
    partial: bool = False
    """Whether parameters that the file does not have stay as the task made them; otherwise that is an error. Names
    that the model does not have are told, and left."""


class LoaderOptions(Section):
    """How training samples come in."""

    num_workers: int = Field(default=0, ge=0, le=256)
    """Processes of each rank that load ahead; 0: samples are loaded when they are needed."""
    prefetch_factor: int = Field(default=2, ge=1)
    """Micro-batches that each of them is ahead."""
    pin_memory: bool = False
    """Whether batches lie in page-locked memory, for GPUs."""


class TrainConfig(Section):
    """What ``zoo train`` does: the task, how long, how often it looks up, and where it writes."""

    carried_by: ClassVar[str] = "zoo.train"

    task: TaskChoice
    steps: int = Field(gt=0)
    """Optimizer steps."""
    out: str = "runs/train"
    """Directory of logs, picture and checkpoints, from where the command runs."""
    if_exists: Literal["refuse", "resume", "number"] = "refuse"
    """What to do when there is a run in ``out`` already: refuse, go on from its latest checkpoint, or write into
    ``<out>-2``, ``<out>-3``, … A restart by torchrun or zoo launch goes on in any case."""
    validate_every: int | None = Field(default=100, gt=0)
    """Steps between validations; null for one at the end only."""
    checkpoint_every: int | None = Field(default=None, gt=0)
    """Steps between checkpoints; null for one at the end only."""
    keep_checkpoints: int | None = Field(default=None, gt=0)
    """How many of the latest checkpoints are kept; null for all."""
    threads: int | None = Field(default=None, gt=0)
    """Threads of each rank; null for the processor's cores divided by the ranks on it, at least one."""
    loader: LoaderOptions = Field(default_factory=LoaderOptions)
    warm_start: WarmStart | None = None
    save_model: bool = True
    """Whether the finished run leaves the model's weights as ``model/model.safetensors``."""


def read_config(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, registry: Registry = DEFAULT
) -> Config:
    """A configuration with a ``train`` section, for the ranks that the environment names.

    A schedule whose ``total_num_steps`` is "auto" gets ``train.steps``.

    Raises:
        ConfigError: everything that is wrong with it.
        FileNotFoundError: no such file.
    """
    return read_document(source, overrides, registry=registry).load()


def read_document(
    source: str | Path | Mapping[str, Any], overrides: Iterable[str] = (), *, registry: Registry = DEFAULT
) -> Document:
    """The same before its values are validated, for whoever changes some of them."""
    document = read(source, overrides=tuple(overrides), registry=registry)
    section = document.values.get("train")
    if not isinstance(section, Mapping):
        raise ConfigError(
            ['train: missing; say what to train, such as {"task": {"type": "byte_lm"}, "steps": 100}'], document.where
        )
    if STEPS_OF_SCHEDULE in document.auto_paths() and section.get("steps") is not None:
        return document.resolve_auto({STEPS_OF_SCHEDULE: section["steps"]})
    return document
