"""The training job: a task, an engine, logs, validation, checkpoints, a picture, and a verdict.

* :class:`TrainConfig`: the section ``train`` of a configuration; :func:`read_config` reads a whole one.
* :func:`train`: run it. :class:`Result`: what came out.
* :func:`forecast`: what it will hold and move on each rank, without running it.
* :class:`Task`: what a training task has to offer (kind "task" in the registry).
"""

from zoo.train.config import TrainConfig, read_config
from zoo.train.forecasting import forecast
from zoo.train.job import Result, train
from zoo.train.task import Task

__all__ = ["Result", "Task", "TrainConfig", "forecast", "read_config", "train"]
