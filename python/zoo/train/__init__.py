"""The training job: a task, an engine, logs, validation, checkpoints, a picture, and a verdict.

* :class:`TrainConfig`: the section ``train`` of a configuration; :func:`read_config` reads a whole one.
* :func:`train`: run it. :class:`Result`: what came out. :class:`NotFiniteError`, :class:`DataEndError`,
  :class:`StoppedError`: what ends it early; ``STOPPED``: the exit code of ``zoo train`` after the last.
* :func:`replay`: a step of a run once more, compared bit by bit. :class:`Replay`: what came out.
* :func:`forecast`: what it will hold and move on each rank, without running it.
* :class:`Task`: what a training task has to offer (kind "task" in the registry).
"""

from zoo.train.config import TrainConfig, read_config
from zoo.train.forecasting import forecast
from zoo.train.job import DataEndError, StoppedError, train
from zoo.train.replay import Replay, replay
from zoo.train.report import Result
from zoo.train.steps import NotFiniteError
from zoo.train.stopping import STOPPED
from zoo.train.task import Task

__all__ = [
    "STOPPED",
    "DataEndError",
    "NotFiniteError",
    "Replay",
    "Result",
    "StoppedError",
    "Task",
    "TrainConfig",
    "forecast",
    "read_config",
    "replay",
    "train",
]
