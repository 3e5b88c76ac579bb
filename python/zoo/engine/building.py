"""From sections of the configuration to objects, through the registry."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo.config import Config
from zoo.layout import axes_of
from zoo.parts import Environment
from zoo.registry import Registry
from zoo.shard import Precision, ShardedModel
from zoo.zero import LossScaler, ZeroOptimizer

OptimizerFactory = Callable[..., torch.optim.Optimizer]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def compute_dtype(config: Config) -> torch.dtype | None:
    """The 16-bit type of parameters; None for the type that they have."""
    return torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None


def input_dtype(config: Config) -> torch.dtype | None:
    """What floating-point arguments of the model are cast to; None for no cast."""
    section = config.bf16 if config.bf16.enabled else config.fp16
    return compute_dtype(config) if section.auto_cast else None


def autocast_dtype(config: Config) -> torch.dtype | None:
    """What the model's forward is autocast to; None without autocast."""
    section = config.torch_autocast
    found: torch.dtype = getattr(torch, section.dtype)
    return found if section.enabled else None


def loss_scale(config: Config) -> float | LossScaler | None:
    """What the fp16 section says about loss scaling; None unless it is enabled."""
    fp16 = config.fp16
    if not fp16.enabled:
        return None
    if fp16.loss_scale > 0:
        return fp16.loss_scale
    return LossScaler(
        scale=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=fp16.min_loss_scale,
    )


def shard_options(config: Config, group: Any, mesh: Any) -> dict[str, Any]:
    """What a ShardedModel and a ZeroOptimizer are told alike."""
    section = config.zero_optimization
    axes = {} if mesh is None else {"data_axes": config.mesh.data_axes, "layer_axes": config.mesh.layer_axes}
    return {
        "config": section, "group": group, "mesh": mesh, **axes, "check": config.comm.check, "aio": config.aio,
        "precision": Precision(
            accumulate=DTYPES[accumulated] if (accumulated := config.data_types.grad_accum_dtype) else None,
            reduce=DTYPES[config.communication_data_type] if config.communication_data_type else None,
            predivide=float("inf") if config.prescale_gradients else config.gradient_predivide_factor,
        ),
        "sparse_gradients": config.sparse_gradients,
    }  # fmt: skip


def build_optimizer(
    config: Config,
    model: nn.Module,
    registry: Registry,
    *,
    group: Any = None,
    mesh: Any = None,
    params: Iterable[Any] | None = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
) -> ZeroOptimizer | None:
    """The optimizer that the configuration names, under the ZeRO stage that it asks for; None where none is asked for.

    The norm of the gradients is measured in every step, also where nothing is clipped, unless updates are made in
    backward.

    Args:
        optimizer: a class to use instead of the one that the configuration names; or an instance, which has its groups
            and arguments already.

    Raises:
        ValueError: an option is not one of its own.
    """
    section = config.optimizer
    if optimizer is None and section is None:
        return None
    options = dict(section.params) if section is not None else {}
    if optimizer is None and section is not None:
        optimizer = registry.get("optimizer", section.type)
    measures = 0.0 if config.zero_optimization.update_in_backward else float("inf")
    return ZeroOptimizer(
        model,
        stage=config.zero_optimization.stage,
        optimizer=optimizer,
        params=params,
        clip_norm=config.gradient_clipping or measures,
        loss_scale=loss_scale(config),
        nonfinite_gradients="use" if config.bf16.enabled and not config.bf16.check_grad_overflow else "skip",
        **shard_options(config, group, mesh),
        **options,
    )


def build_schedule(config: Config, optimizer: ZeroOptimizer | None, given: Any, registry: Registry) -> Any:
    """The learning-rate schedule: an instance or a callable that the user gives, or what the configuration names.

    Raises:
        ValueError: there is no optimizer to schedule, or the schedule is one of another optimizer.
    """
    named = config.scheduler
    if given is None and named is None:
        return None
    if optimizer is None:
        raise ValueError(
            "a learning-rate schedule is asked for, and there is no optimizer. Give initialize an optimizer, or the "
            "configuration an optimizer section."
        )
    if given is None and named is not None:
        return registry.build("lr_schedule", named.type, named.params, optimizer=optimizer)
    if isinstance(given, type) or not hasattr(given, "step"):
        if not callable(given):
            raise ValueError(
                f"lr_scheduler={given!r} is a {type(given).__name__}; it takes a schedule, which has step(), or a "
                "callable optimizer → schedule."
            )
        made = given(optimizer)
        if not callable(getattr(made, "step", None)):
            raise ValueError(
                f"lr_scheduler={given!r} made a {type(made).__name__} of the optimizer; it returns a schedule, which "
                "has step()."
            )
        given = made
    _check_moves(given, optimizer)
    return given


def _check_moves(schedule: Any, optimizer: ZeroOptimizer) -> None:
    """Raise ValueError where a schedule moves the learning rates of another optimizer, and none of this one's."""
    groups = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if not isinstance(groups, list) or any(group is own for group in groups for own in optimizer.param_groups):
        return
    kind = type(schedule).__name__
    raise ValueError(
        f"lr_scheduler is a {kind} of another optimizer, a {type(schedule.optimizer).__name__}: it would move the "
        "learning rates of that one, and those of the engine would stay. Give initialize that very optimizer too "
        f"(optimizer=..., without an optimizer section), or a callable: lr_scheduler=lambda optimizer: {kind}(...)."
    )


def build_loader(
    config: Config, data: Any, collate_fn: Callable[[list[Any]], Any] | None, environment: Environment, parts: Any,
    more: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A loader of this rank's micro-batches: ours over a map-style data set, or what a part makes of it; anything that
    is a loader already is taken as it is."""
    how: dict[str, Any] = {
        "micro_batch_size": config.train_micro_batch_size_per_gpu, "rank": environment.batch_rank,
        "size": environment.batch_ranks, "seed": config.seed, "collate_fn": collate_fn,
    }  # fmt: skip
    if more:
        _check_more(more, how)
    if data is None:
        return None
    if not hasattr(data, "__getitem__"):
        if not hasattr(data, "__iter__"):
            raise ValueError(
                f"training_data is a {type(data).__name__}; it is a data set with __len__ and __getitem__, or a loader "
                "of this rank's batches, which can be iterated."
            )
        if collate_fn is not None:
            raise ValueError(f"collate_fn with training_data that is a loader, a {type(data).__name__}; give it that.")
        return data
    made = parts.make_loader(data, **how)
    if made is None:
        from zoo.engine.loader import ShardedLoader

        return ShardedLoader(data, **how, **more)
    idle = sorted(name for name in ("num_workers", "pin_memory") if more.get(name))
    if idle:
        raise ValueError(
            f"{' and '.join(idle)} of the engine's own loader: an engine part makes the loader, and its own section "
            "says so, such as data_efficiency.data_sampling.num_workers."
        )
    return made


def _check_more(more: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of a loader that it does not take, or that are known already."""
    from zoo.engine.loader import ShardedLoader

    known = [name for name in inspect.signature(ShardedLoader).parameters if name not in ("dataset", *how)]
    for name in more:
        if name not in known:
            raise ValueError(
                f"initialize got loader={{{name!r}: ...}}; allowed are {', '.join(known)}. The others come from the "
                "configuration and the other arguments."
            )


def with_axes(config: Config, model: nn.Module) -> Config:
    """The configuration with the mesh axes that layers of the model and sections need, where it names none itself.

    Consecutive ranks are along the axes that are needed, and all others along "data". They are data axes, so that the
    batch is cut as without a mesh. In a model that was cut for a mesh of its own they are what "data" is there.
    """
    needed = needed_axes(config, model)
    own = own_axes(model)
    if not needed or not dist.is_initialized() or (config.mesh.axes and config.mesh.axes != own):
        return config
    axes: dict[str, int] = {}
    for name, size in (own or {"data": -1}).items():
        axes |= {"data": -1, **needed} if name == "data" else {name: size}
    return config.model_copy(update={"mesh": config.mesh.model_copy(update={"axes": axes})})


def needed_axes(config: Config, model: nn.Module) -> dict[str, int]:
    """Axes of more than one rank that layers of the model and sections need, and that the mesh does not name."""
    needed = axes_of(model)
    for name in config.package_sections:
        if config.asks_for(name):
            needed.update(getattr(getattr(config, name), "mesh_axes", {}))
    return {name: size for name, size in needed.items() if size > 1 and name not in config.mesh.axes}


def own_axes(model: nn.Module) -> dict[str, int]:
    """The axes of the mesh for which a model was cut when it was made (its method ``mesh_axes``); empty without."""
    axes = getattr(model, "mesh_axes", None)
    found = dict(axes()) if callable(axes) else {}
    return found if math.prod(found.values()) > 1 else {}


def build_mesh(config: Config, mesh: Any, device: torch.device) -> Any:
    """The DeviceMesh of the job: the one given, or that of the section; None where all ranks are data-parallel.

    Raises:
        ValueError: both are given, or the one that is given has no names.
    """
    section = config.mesh
    if mesh is not None:
        check_names(mesh)
        if section.axes and tuple(section.axes) != tuple(mesh.mesh_dim_names):
            raise ValueError(
                f"mesh= has the axes {tuple(mesh.mesh_dim_names)}, and the configuration's mesh.axes "
                f"{tuple(section.axes)}; give one of the two."
            )
        return mesh
    if not section.axes or not dist.is_initialized():
        return None
    from torch.distributed.device_mesh import init_device_mesh  # a second of imports that most jobs do without

    sizes = section.sizes(dist.get_world_size())
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_names(mesh: Any) -> None:
    """Raise ValueError unless it is a DeviceMesh with names."""
    if not getattr(mesh, "mesh_dim_names", None):
        raise ValueError("mesh= takes a DeviceMesh with names: init_device_mesh(..., mesh_dim_names=(...)).")


def make_environment(config: Config, mesh: Any, group: Any) -> Environment:
    """Where this rank is."""
    if not dist.is_initialized():
        return Environment(config=config, rank=0, world_size=1, batch_rank=0, batch_ranks=1, mesh=mesh)
    if mesh is None:
        group = group.get_group() if hasattr(group, "mesh") else getattr(group, "group", group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return Environment(config=config, rank=rank, world_size=size, batch_rank=rank, batch_ranks=size, group=group)
    place = 0
    for axis in config.mesh.batch_axes:
        place = place * mesh.size(mesh.mesh_dim_names.index(axis)) + mesh.get_local_rank(axis)
    return Environment(
        config=config, rank=dist.get_rank(), world_size=dist.get_world_size(), batch_rank=place,
        batch_ranks=config.batch_ranks, mesh=mesh,
    )  # fmt: skip


def evaluates(config: Config, model: nn.Module, group: Any, mesh: Any) -> ShardedModel:
    """The model without an optimizer, split as the configuration says."""
    return ShardedModel(model, trains=False, **shard_options(config, group, mesh))
