"""What the job of a configuration will hold and move, without running it."""

from __future__ import annotations

import torch

from zoo.config import Config
from zoo.engine.building import build_optimizer, compute_dtype
from zoo.registry import DEFAULT, Registry
from zoo.shard import DryRun
from zoo.train.task import Task
from zoo.zero import Forecast


def forecast(
    config: Config, *, ranks: int = 1, rank: int = 0, device: str = "cpu", registry: Registry = DEFAULT
) -> Forecast:
    """The forecast of rank ``rank`` of ``ranks``, from the plan of the optimizer; nothing is allocated but the model.

    Args:
        device: where the model computes; "cuda" tells host memory from the device's.

    Raises:
        ValueError: what the user can fix.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}; allowed are 'cpu' and 'cuda'.")
    if config.train is None:
        raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
    choice = config.train.task
    task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
    try:
        with torch.device("meta"):
            model = task.model()
    except (RuntimeError, NotImplementedError):  # its initialisation needs values
        model = task.model()
    model.to("meta", compute_dtype(config))
    optimizer = build_optimizer(config, model, registry, group=DryRun(ranks, rank, device_type=device))
    if optimizer is None:
        raise ValueError("the configuration has no optimizer section; training needs one.")
    return optimizer.forecast()
