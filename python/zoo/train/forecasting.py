"""What the job of a configuration will hold and move, and how long it takes, before it runs."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from zoo.config import Config
from zoo.cost import Forecast, Hardware, SimulatedTime, Software, StepTime
from zoo.engine.building import build_optimizer, compute_dtype
from zoo.engine.forecasting import machine_of, shape_of, time_of
from zoo.engine.records import reductions_of
from zoo.registry import DEFAULT, Registry
from zoo.shard import DryRun
from zoo.train.dry import dry_job, further_axes, task_of, working
from zoo.train.task import Task

__all__ = ["forecast", "model_of", "peaks"]


def forecast(
    config: Config, *, ranks: int = 1, rank: int = 0, device: str | None = None, registry: Registry = DEFAULT,
    micro_batches: int | None = None, hardware: str | Hardware | None = None, software: str | Software = "eager",
    peak: bool = False,
) -> Forecast:  # fmt: skip
    """The forecast of rank ``rank`` of ``ranks``, from the plan of the optimizer; nothing is allocated but the model.

    Of a job with further axes (stages, tensor parts, sequences, experts) it is what its engines say, in a dry run of
    the job (:mod:`zoo.train.dry`).

    Args:
        device: where the model computes, by which host memory is told from the device's: "cuda" where hardware is
            given, else "cpu".
        micro_batches: of a step; by default ``gradient_accumulation_steps``, as ``config`` was loaded.
        hardware: by name or file: how long a step takes there. By formulas where the task's model is one of
            transformers and all ranks are data-parallel, else from a dry run under virtual time.
            software: see :meth:`zoo.engine.Engine.forecast`.
        peak: ``peak_bytes`` too, from a dry run of all ranks (:func:`peaks`).

    Raises:
        ValueError: what the user can fix.
    """
    device = device if device is not None else "cpu" if hardware is None or peak else "cuda"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}; allowed are 'cpu' and 'cuda'.")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks}; a rank is from 0 to ranks - 1, and there is at least one.")
    if micro_batches is not None and micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}; a step has at least one.")
    if peak and device != "cpu":
        raise ValueError(f"peak=True with device={device!r}: dry runs are of the CPU. Leave one of them out.")
    machine = None if hardware is None else machine_of(hardware, software)
    task = task_of(config, registry)
    n = int(config.gradient_accumulation_steps) if micro_batches is None else micro_batches
    model = model_of(task, config)
    alone = not further_axes(config, model, ranks)
    time: StepTime | SimulatedTime | None = None
    if alone:
        found = _planned(config, model, registry, DryRun(ranks, rank, device_type=device), n)
        time = None if machine is None else _by_formula(config, task, model, machine, found, ranks, n)
    if not alone or (machine is not None and time is None):
        if n != config.gradient_accumulation_steps:
            raise ValueError(f"micro_batches={n} of a job that is run to be forecast: set gradient_accumulation_steps.")
        job = dry_job(config, ranks=ranks, registry=registry, machine=machine, alike=alone)
        found, time = (found if alone else job.forecasts[rank]), job.time
    if peak:
        found = dataclasses.replace(found, peak_bytes=peaks(config, ranks=ranks, registry=registry)[rank])
    return dataclasses.replace(found, time=time)


def _planned(config: Config, model: nn.Module, registry: Registry, group: DryRun, micro_batches: int) -> Forecast:
    optimizer = build_optimizer(config, model, registry, group=group)
    if optimizer is None:
        raise ValueError("the configuration has no optimizer section; training needs one.")
    found = optimizer.forecast(micro_batches=micro_batches, reductions=reductions_of(config, micro_batches))
    return dataclasses.replace(found, micro_batches=micro_batches)


def _by_formula(
    config: Config, task: Task, model: nn.Module, machine: tuple[Hardware, Software], found: Forecast, ranks: int,
    micro_batches: int,
) -> StepTime | None:  # fmt: skip
    """None where the model has no shape that formulas know."""
    try:
        shape = shape_of(model, task.units_per_sample)
    except ValueError:
        return None
    return time_of(shape, config, *machine, data=ranks, axes={}, micro_batches=micro_batches, found=found)


def model_of(task: Task, config: Config) -> nn.Module:
    """Its model, on meta, in the dtype of computation.

    Raises:
        ValueError: it cannot be built on this machine.
    """
    with working(config, "build its model"):
        try:
            with torch.device("meta"):
                model = task.model()
        except (RuntimeError, NotImplementedError):  # its initialisation needs values
            model = task.model()
    model.to("meta", compute_dtype(config))
    return model


def peaks(config: Config, *, ranks: int = 1, registry: Registry = DEFAULT) -> list[int]:
    """Of each rank, the most host bytes that are allocated at the same time in a step: by torch, and by the pools of
    gathered parameters and offloaded states.

    See :func:`zoo.train.dry.dry_job`; all ranks run.

    Raises:
        ValueError: the configuration trains nothing, or for another number of ranks. RuntimeError: zoo's native
            library, which counts, is not here.
    """
    found = dry_job(config, ranks=ranks, registry=registry, counts=True).peak_bytes
    return [int(one) for one in found if one is not None]
