"""``initialize``: everything a training script needs, from one configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from zoo.comm import init_distributed
from zoo.config import Config, load
from zoo.engine.building import OptimizerFactory, build_optimizer, build_schedule, cast, check_supported
from zoo.engine.engine import Engine
from zoo.engine.loader import ShardedLoader
from zoo.registry import DEFAULT, Registry
from zoo.zero import ZeroOptimizer


def initialize(
    config: str | Path | Mapping[str, Any] | Config,
    model: nn.Module,
    *,
    dataset: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    params: list[dict[str, Any]] | None = None,
    group: Any = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    lr_scheduler: Callable[[ZeroOptimizer], Any] | None = None,
    overrides: Mapping[str, Any] | Iterable[str] = (),
    registry: Registry = DEFAULT,
) -> tuple[Engine, ZeroOptimizer, ShardedLoader[Any] | None, Any]:
    """Build the engine that a configuration describes. A collective: every rank calls it with the same configuration.

    Joins the process group that a launcher such as torchrun set up, unless that was done before.

    Args:
        config: a path, a mapping, or what ``zoo.config.load`` returned.
        model: on its device; it is cast in place where the configuration asks for fp16 or bf16.
        dataset: map-style; None when the script brings its own batches.
        collate_fn: list of samples → batch.
        params: parameter groups as for ``torch.optim``; all of the model's parameters if not given.
        group: the data-parallel process group; the default group if not given.
        optimizer: an optimizer class to use instead of the one that the configuration names; or an instance that has
            made no step, with its own groups and arguments (not with an optimizer section that has params).
        lr_scheduler: ``optimizer → schedule``, instead of the one that the configuration names.
        overrides: as for ``zoo.config.load``; not with a configuration that is loaded already.
        registry: where optimizers and schedules are looked up.

    Returns:
        (engine, optimizer, data loader or None, schedule or None).

    Raises:
        ValueError: what is wrong in the configuration, with the path of the key.
        NotImplementedError: an option that is known but not carried out.
    """
    config = _configuration(config, overrides, group, registry)
    check_supported(config)
    cast(model, config)
    zero = build_optimizer(config, model, registry, group=group, params=params, optimizer=optimizer)
    schedule = lr_scheduler(zero) if lr_scheduler is not None else build_schedule(config, zero, registry)
    loader: ShardedLoader[Any] | None = None
    if dataset is not None:
        loader = ShardedLoader(
            dataset,
            config.train_micro_batch_size_per_gpu,
            rank=zero.comm.rank,
            size=zero.comm.size,
            seed=config.seed,
            collate_fn=collate_fn,
        )
    engine = Engine(config, model, zero, loader, schedule)
    return engine, zero, loader, schedule


def _configuration(source: Any, overrides: Any, group: Any, registry: Registry) -> Config:
    if isinstance(source, Config):
        if overrides:
            raise ValueError(
                "initialize got a loaded configuration and overrides; give the overrides to zoo.config.load."
            )
        init_distributed(timeout_s=source.comm.timeout_s)
        size = _world_size(group)
        if source.world_size != size:
            raise ValueError(
                f"the configuration was loaded for {source.world_size} ranks and the process group has {size}; load "
                f"it with "
                f"world_size={size}, so that the batch sizes fit."
            )
        return source
    if not dist.is_initialized():
        # A first reading, for the timeout; the second knows how many ranks there really are.
        init_distributed(timeout_s=load(source, overrides=overrides, registry=registry).comm.timeout_s)
    return load(source, overrides=overrides, world_size=_world_size(group), registry=registry)


def _world_size(group: Any) -> int:
    if not dist.is_initialized():
        return 1
    return group.size() if hasattr(group, "mesh") else dist.get_world_size(group)
