"""``deepspeed.initialize`` and what comes before it."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zoo import comm
from zoo.comm.launch import PORT
from zoo.config import Config, ConfigError, load, root_keys
from zoo.deepspeed.adapters import groups
from zoo.deepspeed.adapters.data import loader_for
from zoo.deepspeed.adapters.engine import DeepSpeedEngine
from zoo.deepspeed.adapters.hugging_face import tell_accelerate
from zoo.deepspeed.adapters.leaves import apply_zero_leaf_module_config
from zoo.deepspeed.adapters.optimizer import OptimizerView
from zoo.engine import initialize as _initialize
from zoo.zero.sharding.guard import ShardedParameter

_log = logging.getLogger("zoo.deepspeed")
_warned: set[str] = set()


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = PORT,
    verbose: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the job's process group, if there is one and it is not joined; see :func:`zoo.comm.init_distributed`.

    "nccl" on a machine without CUDA becomes "gloo", which is warned of.
    """
    if dist_backend == "nccl" and not torch.cuda.is_available():
        dist_backend = "gloo"
        if not dist.is_initialized():
            _log.warning("init_distributed('nccl'): there is no CUDA device here; the ranks join over gloo instead.")
    comm.init_distributed(
        dist_backend, auto_mpi_discovery, distributed_port, verbose, timeout, init_method, dist_init_required,
        config if isinstance(config, Mapping) else None, rank, world_size,
    )  # fmt: skip
    if dist.is_initialized():
        tell_accelerate()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, OptimizerView | None, Any, Any]:
    """The engine that a configuration describes; see :func:`zoo.engine.initialize`. A collective.

    Args:
        args: an object with ``deepspeed_config``, the path of the configuration, where ``config`` is not given.
        model: it is brought to this process's device.
        optimizer: an instance that has made no step, or a callable ``parameters → optimizer``; it takes the place of
            the configuration's.
        model_parameters: parameters or groups of them. Frozen ones are left out.
        training_data, collate_fn: as of :func:`zoo.engine.initialize`.
        lr_scheduler: a schedule, or a callable ``optimizer → schedule``.
        distributed_port: of rank 0, where the launcher names none.
        mpu: an object with ``get_data_parallel_group()``; its ranks share the model's state.
        dist_init_required: as of :func:`zoo.engine.initialize`.
        config, config_params: a dict, the path of a file, or base64 of JSON. Root keys that nobody knows are warned of,
            once, and left out.
        mesh_param: refused: name the axes in the configuration's section ``mesh``.

    Returns:
        (engine, optimizer, data loader, schedule), the last three None where there is none.

    Raises:
        ValueError: (zoo.config.ConfigError among them) what cannot work, and how to say it.
    """
    if model is None:
        raise ConfigError("initialize() got no model; give it model=, an nn.Module.")
    if mesh_param is not None:
        raise ConfigError('initialize(mesh_param=...): name the axes in the configuration, {"mesh": {"axes": {...}}}.')
    document = find_document(args, config if config is not None else config_params)
    given = _translated(document, drop_optimizer=optimizer is not None)
    group = mpu.get_data_parallel_group() if mpu is not None else None
    if dist_init_required is not False:
        comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _to_device(model)
    zero = document.get("zero_optimization")
    apply_zero_leaf_module_config(model, (zero.get("leaf_module") or {}) if isinstance(zero, Mapping) else None)
    # An instance has its groups already.
    parameters = None if isinstance(optimizer, torch.optim.Optimizer) else _trainable(model_parameters)
    data = _data(model, given, training_data, group, collate_fn)
    engine, _, loader, schedule = _initialize(
        given, model, optimizer=optimizer, model_parameters=parameters, training_data=data,
        lr_scheduler=lr_scheduler, dist_init_required=False, group=group,
        collate_fn=collate_fn if data is training_data else None,
    )  # fmt: skip
    groups.follow(engine, mpu)
    made = engine_class(model)(engine, document, mpu)
    return made, made.optimizer, loader, schedule


def _data(model: nn.Module, document: Mapping[str, Any], data: Any, group: Any, collate_fn: Any) -> Any:
    """Batches in DeepSpeed's order; zoo's own where stages or a section that chooses samples need them."""
    chooses = any(document.get(name) for name in ("data_efficiency", "curriculum_learning"))
    if data is None or chooses or engine_class(model) is not DeepSpeedEngine:
        return data
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    return loader_for(data, int(load(document, world_size=size).train_micro_batch_size_per_gpu), group, collate_fn)


def engine_class(model: nn.Module) -> type[DeepSpeedEngine]:
    """The class of engine for a model."""
    from zoo.pipe import PipelineModule

    if isinstance(model, PipelineModule):
        from zoo.deepspeed.adapters.pipeline import PipelineEngine

        return PipelineEngine
    return DeepSpeedEngine


def find_document(args: Any, config: Any) -> dict[str, Any]:
    """The configuration as a dict of its own.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if config is None:
        config = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is None:
        raise ConfigError(
            "there is no configuration; give initialize config= (a dict or a path), or args with deepspeed_config."
        )
    if isinstance(config, Config):
        raise ConfigError("initialize() of deepspeed takes a dict or a path; zoo.engine.initialize takes a Config.")
    if isinstance(config, Mapping):
        return {key: copy.deepcopy(value) for key, value in config.items()}
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"the configuration is a {type(config).__name__}; give a dict or the path of a file.")
    path = Path(config)
    if _is_file(path):
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        return _json(path.read_text(encoding="utf-8"), str(path))
    try:
        text = base64.urlsafe_b64decode(str(config)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise ConfigError(f"the configuration {str(config)!r} is no file, and no base64 of one.") from None
    return _json(text, "the configuration in base64")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name: base64
        return False


def _json(text: str, where: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
            raise ConfigError(f"{where}: given twice: {', '.join(twice)}. Keep one of them.")
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is a {type(found).__name__}; a configuration is an object.")
    return found


def _translated(document: Mapping[str, Any], *, drop_optimizer: bool) -> dict[str, Any]:
    """What zoo reads of it."""
    found = dict(document)
    for key in sorted(set(found) - root_keys()):
        if key not in _warned:
            _log.warning("the configuration has the root key %r, which neither zoo nor DeepSpeed knows.", key)
            _warned.add(key)
        del found[key]
    zero = found.get("zero_optimization")
    if isinstance(zero, Mapping) and "leaf_module" in zero:  # declared on the model
        found["zero_optimization"] = {key: value for key, value in zero.items() if key != "leaf_module"}
    if not (isinstance(zero, Mapping) and zero.get("update_in_backward")):  # a key of zoo alone, which cannot clip
        found.setdefault("gradient_clipping", 1.0)  # DeepSpeed clips to 1 unless told otherwise
    every = found.get("steps_per_print")
    if isinstance(every, float) and math.isinf(every):
        found["steps_per_print"] = None
    if drop_optimizer and found.pop("optimizer", None) is not None:
        _log.warning("initialize() got an optimizer; the configuration's section optimizer is not used.")
    section = found.get("optimizer")
    if isinstance(section, Mapping) and section.get("type") == "AdamW":
        params = section.get("params") or {}
        if params.get("torch_adam") and "weight_decay" not in params:  # torch's class has a default of its own
            found["optimizer"] = {**section, "params": {**params, "weight_decay": 0.01}}
    return found


def _trainable(given: Iterable[Any] | None) -> list[Any] | None:
    """Parameters and groups without what is frozen, as DeepSpeed takes them."""
    if given is None:
        return None
    found: list[Any] = []
    for item in given:
        if isinstance(item, Mapping):
            members = item["params"]
            members = [members] if isinstance(members, torch.Tensor) else list(members)
            found.append({**item, "params": [p for p in members if _requires_grad(p)]})
        elif _requires_grad(item):
            found.append(item)
    return found


def _requires_grad(item: Any) -> bool:
    tensor = item[1] if isinstance(item, tuple) else item
    return not isinstance(tensor, torch.Tensor) or tensor.requires_grad


def _to_device(model: nn.Module) -> None:
    first = next(model.parameters(), None)
    if first is None or isinstance(first, ShardedParameter) or not torch.cuda.is_available():
        return
    model.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
