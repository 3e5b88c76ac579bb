"""What the job of a configuration will hold and move, without running it."""

from __future__ import annotations

import dataclasses

import torch

from zoo.config import Config
from zoo.cost import Forecast, Hardware, Software
from zoo.engine.building import build_optimizer, compute_dtype
from zoo.engine.forecasting import shape_of, time_of
from zoo.engine.records import reductions_of
from zoo.registry import DEFAULT, Registry
from zoo.shard import DryRun
from zoo.train.task import Task


def forecast(
    config: Config, *, ranks: int = 1, rank: int = 0, device: str = "cpu", registry: Registry = DEFAULT,
    micro_batches: int | None = None, hardware: str | Hardware | None = None, software: str | Software = "eager",
) -> Forecast:  # fmt: skip
    """The forecast of rank ``rank`` of ``ranks``, from the plan of the optimizer; nothing is allocated but the model.

    All ranks are data-parallel; :meth:`zoo.engine.Engine.forecast` knows the other axes of a mesh.

    Args:
        device: where the model computes; "cuda" tells host memory from the device's.
        micro_batches: of a step; by default ``gradient_accumulation_steps``, as ``config`` was loaded.
        hardware: by name or file: how long a step takes there, where the task's model is one of transformers.
            software: see :meth:`zoo.engine.Engine.forecast`.

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
    n = int(config.gradient_accumulation_steps) if micro_batches is None else micro_batches
    found = optimizer.forecast(micro_batches=n, reductions=reductions_of(config, n))
    found = dataclasses.replace(found, micro_batches=n)
    if hardware is None:
        return found
    time = time_of(
        shape_of(model, task.units_per_sample), config, hardware, software, data=ranks, axes={}, micro_batches=n
    )
    return dataclasses.replace(found, time=time)
