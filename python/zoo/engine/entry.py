"""``initialize``: everything a training script needs, from one configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo import checkpointing
from zoo.comm import Communicator, init_distributed, raise_in_next, raise_together
from zoo.config import Config, read
from zoo.engine import attachments, building
from zoo.engine.building import OptimizerFactory
from zoo.engine.engine import Engine
from zoo.engine.given import check_buffers, check_given
from zoo.monitor import Feed
from zoo.parts import Environment, Sink
from zoo.registry import DEFAULT, Registry
from zoo.shard import ShardedModel
from zoo.shard.agreement import all_ranks, raise_together_alike
from zoo.zero import ZeroOptimizer


def initialize(
    config: str | Path | Mapping[str, Any] | Config,
    model: nn.Module,
    *,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    dist_init_required: bool | None = None,
    mesh: Any = None,
    group: Any = None,
    parts: Mapping[str, Any] | None = None,
    sinks: Mapping[str, Sink] | None = None,
    monitors: bool = True,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    registry: Registry = DEFAULT,
) -> tuple[Engine, ZeroOptimizer | None, Any, Any]:
    """Build the engine that a configuration describes. A collective: every rank calls it with the same configuration.

    Args:
        config: a path, a mapping, or what ``zoo.config.load`` returned.
        model: on its device; its parameters are cast in place where the configuration asks for fp16 or bf16.
        optimizer: instead of the one that the configuration names: a class or another callable ``(parameters) →
            optimizer``; or an instance that has made no step, with its own groups and arguments (not with an optimizer
            section that has params). Without either the engine only evaluates.
        model_parameters: parameters, (name, parameter) pairs or groups of them, as for ``torch.optim``; all of the
            model's if not given.
        training_data: a data set with length, or a loader that gives this rank's batches; None when the script brings
            its own batches.
        lr_scheduler: instead of the one that the configuration names: a schedule, or a callable ``optimizer →
            schedule``.
        collate_fn: list of samples → batch.
        loader: further arguments of :class:`~zoo.engine.ShardedLoader`, such as ``num_workers``.
        dist_init_required: False: the process group is there already, or there is one rank. True: it has to be joined
            now.
            None: it is joined where a launcher has set up one and this was not done before; see
            :func:`zoo.comm.init_distributed`.
        mesh: a DeviceMesh with names for all axes of the job; the section ``mesh`` says what they mean, or their names
            do (:mod:`zoo.config.mesh`). By default what the section describes.
        group: instead of a mesh: the data-parallel process group; the default group if not given.
        parts: further engine parts by name (:mod:`zoo.parts`). sinks: what gets each step's record, by name, on this
            rank.
        monitors: whether the sinks that the configuration asks for are built.
        overrides: as for ``zoo.config.load``; not with a configuration that is loaded already.
        registry: where optimizers, schedules, parts, sinks and runners are looked up.

    Returns:
        (engine, optimizer, data loader, schedule), the last three None where none was asked for.

    Raises:
        ValueError: what is wrong in the configuration, with the path of the key. Whatever is raised, what it
            had built is closed, and the model is an ordinary one again, but for what interrupts this rank alone.
        RankFailedError: another rank has failed, and with what. Ranks hear of it at once, but of a failure in the
            midst of splitting the model: then when their waits end.
    """
    _join(config, dist_init_required, overrides, registry)
    is_mesh = mesh is None or hasattr(mesh, "mesh_dim_names")
    everyone = all_ranks(group, mesh if is_mesh else None)
    needed: dict[str, Any] = {}
    with raise_together_alike(everyone, "initialize", needed):
        check_given(
            model, parts=parts, sinks=sinks, loader=loader, collate_fn=collate_fn, params=model_parameters,
            monitors=monitors, required=dist_init_required, registry=registry,
        )  # fmt: skip
        if not is_mesh:
            raise ValueError(f"initialize got mesh={mesh!r}, a {type(mesh).__name__}; give a DeviceMesh.")
        if mesh is not None and group is not None:
            raise ValueError("initialize got mesh= and group=, which say the same thing in two ways; give one of them.")
        config = _configuration(config, overrides, _size(mesh, group), mesh, model, registry)
        if mesh is None and group is None:
            config = building.with_axes(config, model)
        dealt = hasattr(training_data, "__iter__") or hasattr(training_data, "__getitem__")
        staged = hasattr(model, "num_stages")  # of which a rank without data needs none
        needed |= _needed_alike(config, own_schedule=lr_scheduler is None, own_data=dealt and not staged)
    first = next(model.parameters(), None)
    mesh = building.build_mesh(config, mesh, first.device if first is not None else torch.device("cpu"))
    environment = building.make_environment(config, mesh, group)
    with contextlib.ExitStack() as undo:
        with raise_together(everyone, "initialize"):
            engine = _built(
                undo, config, model, environment, mesh, everyone, optimizer=optimizer, params=model_parameters,
                data=training_data, schedule=lr_scheduler, collate_fn=collate_fn, loader=loader or {}, group=group,
                parts=parts, sinks=sinks, monitors=monitors, registry=registry,
            )  # fmt: skip
        _resume(engine, config, everyone)
        undo.pop_all()
    return engine, engine.optimizer, engine.dataloader, engine.lr_scheduler


def _resume(engine: Engine, config: Config, everyone: Communicator | None) -> None:
    """Go on from the newest whole checkpoint where ``elasticity.resume_from`` says so and has one. Collective."""
    folder = config.elasticity.resume_from if config.asks_for("elasticity") else None
    if folder is None:
        return
    with raise_together(everyone, "initialize"):  # a folder that the first rank cannot read
        there = checkpointing.has_checkpoints(folder) if everyone is None or everyone.rank == 0 else False
    if everyone is not None:
        there = everyone.broadcast_object(there)
    if there:
        engine.load_checkpoint(folder)


def _needed_alike(config: Config, *, own_schedule: bool, own_data: bool) -> dict[str, Any]:
    """What of a configuration ranks need alike, and nothing compares later on, or not before it has done harm."""
    found: dict[str, Any] = {
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "torch_autocast": building.autocast_dtype(config),
        "auto_cast": building.input_dtype(config),
    }
    if own_schedule and config.scheduler is not None:
        found["scheduler"] = config.scheduler.model_dump()
    if own_data:  # which of it each rank gets
        found |= {"seed": config.seed, "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu}
    return found


def _built(
    undo: contextlib.ExitStack, config: Config, model: nn.Module, environment: Environment, mesh: Any,
    everyone: Communicator | None, *, optimizer: Any, params: Any, data: Any, schedule: Any, collate_fn: Any,
    loader: Mapping[str, Any], group: Any, parts: Any, sinks: Any, monitors: bool, registry: Registry,
) -> Engine:  # fmt: skip
    """The engine. ``undo`` gets what gives everything back where this raises: files, hooks, and the model itself."""
    attached, writers = attachments.build(
        config, environment, registry, everyone, parts=parts, sinks=sinks, monitors=monitors, model=model,
    )  # fmt: skip
    made = [item for name, item in attached.all.items() if name not in (parts or {})]
    made += [item for name, item in writers.items() if name not in (sinks or {})]
    for item in made:
        if hasattr(item, "close"):
            undo.callback(_quietly, item.close)
    with raise_in_next(lambda: everyone, "initialize"):  # the next is at the construction of what shards the model
        attached.check_updates(config.zero_optimization.update_in_backward)
        # Before the model is touched, because data is what is wrong most often.
        batches = building.build_loader(config, data, collate_fn, environment, attached, loader)
        model = attached.prepare(model, mesh)
        buffers = config.data_types.buffer_dtype
        dtype = building.compute_dtype(config)
        if dtype is not None or buffers:
            from zoo.engine.casting import cast

            cast(model, dtype, building.DTYPES[buffers] if buffers else None, config.data_types)
        if optimizer is None and config.optimizer is not None:
            optimizer = registry.get("optimizer", config.optimizer.type)
        if optimizer is not None:
            check_buffers(model)
    zero = building.build_optimizer(config, model, registry, group=group, mesh=mesh, params=params, optimizer=optimizer)
    sharded = zero.sharded if zero is not None else building.evaluates(config, model, group, mesh)
    undo.push(lambda _, error, __: _closed(sharded, error))
    runner = getattr(model, "engine_runner", "plain")
    engine: Engine = registry.get("engine", runner if runner in registry.names("engine") else "plain")(
        config, model, optimizer=zero, sharded=sharded, parts=attached, feed=Feed(writers), registry=registry,
        mesh=mesh, batch_ranks=environment.batch_ranks, batch_rank=environment.batch_rank,
        input_dtype=building.input_dtype(config), autocast_dtype=building.autocast_dtype(config),
    )  # fmt: skip
    engine.dataloader = batches
    engine.lr_scheduler = building.build_schedule(config, zero, schedule, registry)
    return engine


def _quietly(close: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # the error at hand is the news
        close()


def _closed(sharded: ShardedModel, error: BaseException | None) -> None:
    # A collective: for an interrupt of this rank alone the others would not come.
    if isinstance(error, Exception) or (error is not None and sharded.everyone.size == 1):
        _quietly(sharded.close)


def _join(source: Any, required: bool | None, overrides: Any, registry: Registry) -> None:
    """The process group is there after this, if there is one. What is wrong with the arguments is raised where the
    other ranks are told, for which it takes a group."""
    if dist.is_initialized():
        return
    if required is False:
        init_distributed(dist_init_required=False)
        return
    if isinstance(source, Config):
        timeout_s = source.comm.timeout_s
    else:
        given = None
        with contextlib.suppress(Exception):  # it is read again
            section = read(source, overrides=overrides, registry=registry).values.get("comm")
            given = section.get("timeout_s") if isinstance(section, Mapping) else None
        timeout_s = float(given) if isinstance(given, int | float) and given > 0 else 1800.0
    init_distributed(
        timeout=timedelta(seconds=timeout_s), dist_init_required=required if isinstance(required, bool) else None
    )


def _size(mesh: Any, group: Any) -> int:
    """Ranks of the job."""
    if not dist.is_initialized():
        return 1
    if mesh is not None or hasattr(group, "mesh"):
        return int((mesh if mesh is not None else group).size())
    return dist.get_world_size(getattr(group, "group", group))


def _configuration(
    source: Any, overrides: Any, size: int, mesh: Any, model: nn.Module, registry: Registry
) -> Config:  # fmt: skip
    own = building.own_axes(model) if mesh is None else {}
    if not isinstance(source, Config):
        document = read(source, overrides=overrides, registry=registry)
        section = document.values.get("mesh")
        if mesh is not None:
            building.check_names(mesh)
            own = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        if own and not (isinstance(section, Mapping) and section.get("axes")):
            document = document.override({f"mesh.axes.{name}": size for name, size in own.items()})
        return document.load(size)
    if overrides:
        raise ValueError("initialize got a loaded configuration and overrides; give the overrides to zoo.config.load.")
    if source.world_size != size:
        raise ValueError(
            f"the configuration was loaded for {source.world_size} ranks and the process group has {size}; load it "
            f"with world_size={size}, so that the batch sizes fit."
        )
    if (mesh is not None or own) and not source.mesh.axes:
        what = "mesh=" if mesh is not None else f"a {type(model).__name__} that was cut for the axes {own}"
        raise ValueError(
            f"initialize got {what} and a loaded configuration without mesh.axes, whose batch sizes are those of all "
            "ranks; load it with mesh.axes, or give initialize the document."
        )
    return source
