"""The job of a configuration, run in one process without its arithmetic: what it allocates and sends, and its time."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo import sim
from zoo.config import Config
from zoo.cost import Forecast, Hardware, SimulatedTime, Software, cost_on, offloading, pass_s, simulate_events
from zoo.cost.simulated import STEP, simulated_time
from zoo.engine import initialize
from zoo.engine.building import needed_axes, own_axes
from zoo.engine.forecasting import offloads, products_in
from zoo.profiling import costing
from zoo.registry import Registry
from zoo.shard.offload import files_hold_nothing
from zoo.train.job import in_stages
from zoo.train.task import Task

__all__ = ["MOST_RANKS", "DryJob", "dry_job", "further_axes", "task_of", "working"]

MOST_RANKS = 64
"""Of a job whose ranks do not all do the same."""
STEPS = 3
"""The last one is judged: the first makes states, the second is the first one in the order that the first recorded."""


@dataclass(frozen=True, kw_only=True)
class DryJob:
    """What came of it, by rank: the most host bytes at the same time in a step (None: they were not counted), and what
    the engine says of a step. time: where a machine was given."""

    peak_bytes: tuple[int | None, ...]
    forecasts: tuple[Forecast, ...]
    time: SimulatedTime | None = None


@contextmanager
def working(config: Config, what: str) -> Iterator[None]:
    """What the task's own code raises is said with the task's name.

    Raises:
        ValueError: it raised.
    """
    try:
        yield
    except ValueError:
        raise  # which says enough
    except Exception as error:
        name = config.train.task.type if config.train is not None else "of none"
        raise ValueError(f"the task {name!r} cannot {what} here: {type(error).__name__}: {error}") from error


def task_of(config: Config, registry: Registry) -> Task:
    """The task of a configuration.

    Raises:
        ValueError: it has no train section.
    """
    if config.train is None:
        raise ValueError("the configuration has no train section; add one (see zoo.train.TrainConfig).")
    choice = config.train.task
    task: Task = registry.build("task", choice.type, choice.params, seed=config.seed)
    return task


def further_axes(config: Config, model: nn.Module, ranks: int) -> list[str]:
    """Axes of the mesh beside that of data, such as "pipe" or "expert": what a rank holds is not told by its share."""
    sizes = config.mesh.sizes(ranks) if config.mesh.axes else {}
    sizes = {**sizes, **own_axes(model), **needed_axes(config, model)}
    return [name for name, size in sizes.items() if size > 1 and name != "data"]


def dry_job(
    config: Config, *, ranks: int, registry: Registry, counts: bool = False,
    machine: tuple[Hardware, Software] | None = None, alike: bool = False,
) -> DryJob:  # fmt: skip
    """Three steps of all ranks in this process, which compute nothing with large tensors (:func:`zoo.sim.dry`).

    The third step counts. What depends on values is what even ones give. Files of states on NVMe take no room, and lie
    with this machine's temporary ones.

    Args:
        counts: what is allocated. machine: under whose virtual time. alike: all ranks do the same, each with samples
            of its own: one of them runs, in the place of all, where nothing is counted.

    Raises:
        ValueError: what the user can fix. RuntimeError: zoo's native library, which counts, is not here.
    """
    task_of(config, registry)
    if config.world_size != ranks:
        raise ValueError(f"the configuration was loaded for {config.world_size} ranks, not for {ranks}: load it so.")
    alike = alike and not counts and machine is not None
    if ranks > MOST_RANKS and not alike:
        raise ValueError(
            f"a job of {ranks} ranks that do not all do the same: a dry run has at most {MOST_RANKS}. Ask for fewer."
        )
    not_counted: dict[str, int] = {}

    def job(rank: int) -> tuple[int | None, Forecast, int, int]:
        return _rank(config, registry, machine, counts=counts, not_counted=not_counted)

    programs = sim.Programs() if machine is not None else None
    options: dict[str, Any] = {"semantics": "gloo", "transport": "pairwise"}
    if machine is not None:  # as on devices
        options = {"semantics": "nccl", "transport": "native", "role_of": (lambda rank: 0) if alike else None}
    try:
        found: list[Any] = sim.run(ranks, job, programs=programs, **options)
    except sim.RankError as error:
        if isinstance(error.__cause__, ValueError):
            raise ValueError(str(error.__cause__)) from error
        raise
    time = None
    if machine is not None and programs is not None:
        largest = max(found, key=lambda f: f[2])
        time = _time(config, machine, programs, largest, ranks, not_counted)
    return DryJob(peak_bytes=tuple(f[0] for f in found), forecasts=tuple(f[1] for f in found), time=time)


def _rank(
    config: Config, registry: Registry, machine: tuple[Hardware, Software] | None, *, counts: bool,
    not_counted: dict[str, int],
) -> tuple[int | None, Forecast, int, int]:  # fmt: skip
    """(bytes, forecast, parameters that this rank updates, units of a step of all ranks)."""
    loader = {} if config.train is None else dict(config.train.loader)
    with ExitStack() as stack:
        allocated = None
        if counts:
            from zoo.kernels.allocated import Allocated

            allocated = stack.enter_context(Allocated())
        with working(config, "make its data"):  # as they are: ranks that share samples compare them
            task = task_of(config, registry)
            data = task.training_data()
        for context in (sim.dry(), files_hold_nothing()):
            stack.enter_context(context)
        costs = {} if machine is None else stack.enter_context(costing(machine[0].device, dtype=products_in(config)))
        with working(config, "make its model"):
            model = task.model()
        model = in_stages(model, config, data, config.world_size, registry)[0]
        engine = initialize(config, model, training_data=data, loader=loader, registry=registry)[0]
        pools = 0
        for step in range(STEPS):
            if step == STEPS - 1:
                gc.collect()  # what earlier steps left in circles
                if allocated is not None:
                    allocated.reset_peak()
                if machine is not None:
                    sim.compute(0.0, STEP)
            engine.train_batch()
            pools = max(pools, engine.training("forecast").sharded.pool_bytes())
        not_counted.update(costs)
        trainable = engine.training("forecast").sharded.trainable
        updated = sum(b.layout.size // b.num_chunks * len(b.updated_chunks) for b in trainable)
        units = int(config.train_batch_size or 0) * task.units_per_sample
        return (None if allocated is None else allocated.peak_bytes + pools), engine.forecast(), updated, units


def _time(
    config: Config, machine: tuple[Hardware, Software], programs: sim.Programs, of_rank: tuple[Any, Forecast, int, int],
    ranks: int, missing: dict[str, int],
) -> SimulatedTime:  # fmt: skip
    hardware, software = machine
    _, found, updated, units = of_rank
    timeline = simulate_events(programs.programs(), cost_on(hardware), ranks=programs.ranks)
    time = simulated_time(timeline, units=units, ranks=ranks)
    off = offloading(
        found, hardware, forward_s=time.compute_s / 3, backward_s=time.compute_s * 2 / 3,
        update_bytes=software.update_bytes, offloads=offloads(config),
    )  # fmt: skip
    left_out = ["pauses between kernels, and waiting for the host"] * (hardware.device.launch_s == 0)
    left_out += [f"{name}, which has no formula, but for its bytes ({n} times)" for name, n in sorted(missing.items())]
    update_s = pass_s(hardware.device, software.update_bytes * (updated - found.host_updated)) + off.host_update_s
    return dataclasses.replace(
        time, update_s=update_s, offload_s=off.exposed_s, not_counted=(*off.not_counted, *left_out)
    )
