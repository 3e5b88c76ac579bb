"""From sections of the configuration to objects, through the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo.config import Config
from zoo.registry import Registry
from zoo.zero import LossScaler, ZeroOptimizer

OptimizerFactory = Callable[..., torch.optim.Optimizer]


def check_supported(config: Config) -> None:
    """Raise NotImplementedError for options that are read but not carried out by this engine."""
    wrong = []
    if config.prescale_gradients or config.gradient_predivide_factor != 1.0:
        wrong.append("prescale_gradients and gradient_predivide_factor (gradients are added, then divided)")
    if config.communication_data_type is not None:
        wrong.append("communication_data_type (gradients travel in the type they have)")
    if config.comms_logger.verbose or config.comms_logger.debug or config.comms_logger.prof_ops:
        wrong.append("comms_logger.verbose, debug and prof_ops (counts are always kept: engine.comm.log.table())")
    if wrong:
        raise NotImplementedError("the engine does not carry out: " + "; ".join(wrong) + ". Remove them.")


def cast(model: nn.Module, config: Config) -> torch.dtype | None:
    """Put the model into the precision of the configuration; returns the low-precision dtype, None for fp32."""
    dtype = torch.bfloat16 if config.bf16.enabled else torch.float16 if config.fp16.enabled else None
    if dtype is not None:
        model.to(dtype=dtype)
    return dtype


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


def build_optimizer(
    config: Config,
    model: nn.Module,
    registry: Registry,
    *,
    group: Any = None,
    params: list[dict[str, Any]] | None = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
) -> ZeroOptimizer:
    """The optimizer that the configuration names, under the ZeRO stage that it asks for.

    Args:
        optimizer: a class to use instead of the one that the configuration names; or an instance, which has its groups
            and arguments already.

    Raises:
        ValueError: no optimizer is named, or an option is not one of its own.
    """
    section = config.optimizer
    if optimizer is None and section is None:
        raise ValueError(
            "the configuration has no optimizer section and no optimizer was given; add "
            '{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}} or pass optimizer=.'
        )
    options = dict(section.params) if section is not None else {}
    if optimizer is None and section is not None:
        optimizer = registry.get("optimizer", section.type)
    return ZeroOptimizer(
        model,
        stage=config.zero_optimization.stage,
        optimizer=optimizer,
        config=config.zero_optimization,
        group=group,
        params=params,
        clip_norm=config.gradient_clipping,
        check=config.comm.check,
        loss_scale=loss_scale(config),
        aio=config.aio,
        **options,
    )


def build_schedule(config: Config, optimizer: Any, registry: Registry) -> Any:
    """The learning-rate schedule that the configuration names, None without one."""
    if config.scheduler is None:
        return None
    return registry.build("lr_schedule", config.scheduler.type, config.scheduler.params, optimizer=optimizer)
