"""What the job of a configuration will hold and move, without running it."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch

from zoo import sim
from zoo.config import Config
from zoo.cost import Forecast, Hardware, Software
from zoo.engine import initialize
from zoo.engine.building import build_optimizer, compute_dtype
from zoo.engine.forecasting import shape_of, time_of
from zoo.engine.records import reductions_of
from zoo.registry import DEFAULT, Registry
from zoo.shard import DryRun
from zoo.train.task import Task


def forecast(
    config: Config, *, ranks: int = 1, rank: int = 0, device: str = "cpu", registry: Registry = DEFAULT,
    micro_batches: int | None = None, hardware: str | Hardware | None = None, software: str | Software = "eager",
    peak: bool = False,
) -> Forecast:  # fmt: skip
    """The forecast of rank ``rank`` of ``ranks``, from the plan of the optimizer; nothing is allocated but the model.

    All ranks are data-parallel; :meth:`zoo.engine.Engine.forecast` knows the other axes of a mesh.

    Args:
        device: where the model computes; "cuda" tells host memory from the device's.
        micro_batches: of a step; by default ``gradient_accumulation_steps``, as ``config`` was loaded.
        hardware: by name or file: how long a step takes there, where the task's model is one of transformers.
            software: see :meth:`zoo.engine.Engine.forecast`.
        peak: ``peak_bytes`` too, from a dry run of all ranks (:func:`peaks`).

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
    if peak:
        if device != "cpu":
            raise ValueError(f"peak=True with device={device!r}: dry runs are of the CPU. Leave one of them out.")
        found = dataclasses.replace(found, peak_bytes=peaks(config, ranks=ranks, registry=registry)[rank])
    if hardware is None:
        return found
    time = time_of(
        shape_of(model, task.units_per_sample), config, hardware, software, data=ranks, axes={}, micro_batches=n
    )
    return dataclasses.replace(found, time=time)


def peaks(config: Config, *, ranks: int = 1, registry: Registry = DEFAULT) -> list[int]:
    """Of each rank, the most host bytes that are allocated at the same time in a step: by torch, and by the pools of
    gathered parameters and offloaded states.

    The job itself runs, three steps of all ranks in this process, and computes nothing with large tensors
    (:func:`zoo.sim.dry`); the third step counts. What depends on values is what even ones give.

    Raises:
        ValueError: the configuration trains nothing, or has states on NVMe, whose files would be written. RuntimeError:
            zoo's native library, which counts, is not here.
    """
    from zoo.kernels.allocated import Allocated

    if config.train is None:
        raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
    if config.world_size != ranks:
        raise ValueError(f"the configuration was loaded for {config.world_size} ranks, not for {ranks}: load it so.")
    zero = config.zero_optimization
    for name in ("offload_optimizer", "offload_param"):
        if getattr(zero, name).device == "nvme":
            raise ValueError(
                f"the peak of a job with {name} on nvme: a dry run would write its files. Set its device to cpu, or "
                "measure a few steps."
            )
    section = config.train
    choice = section.task

    def job(rank: int) -> int:
        with sim.dry(), Allocated() as allocated:
            task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
            engine = initialize(
                config, task.model(), training_data=task.training_data(), loader=dict(section.loader), registry=registry
            )[0]
            pools = 0
            for step in range(3):
                if step == 2:
                    gc.collect()  # what earlier steps left in circles
                    allocated.reset_peak()
                engine.train_batch()
                pools = max(pools, engine.training("forecast").sharded.pool_bytes())
            return allocated.peak_bytes + pools

    found: list[Any] = sim.run(ranks, job, semantics="gloo", transport="pairwise")
    return found
