"""What a step of an engine or a configuration will cost: bytes from its plan, seconds from the shape of its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zoo.config import Config
from zoo.cost import (
    SOFTWARE,
    Forecast,
    Hardware,
    Layout,
    Software,
    StepTime,
    Transformer,
    offloading,
    read_hardware,
    step_time,
    transformer_of,
)
from zoo.engine.building import autocast_dtype, compute_dtype
from zoo.engine.numbers import whole
from zoo.engine.records import reductions_of
from zoo.shard import Drive
from zoo.zero import ZeroOptimizer


def forecast_of(
    engine: Any, runner: Any, num_micro_batches: int | None, *, hardware: str | Hardware | None,
    software: str | Software, seq: int | None, transformer: Transformer | None,
) -> Forecast:  # fmt: skip
    """See :meth:`zoo.engine.Engine.forecast`."""
    given = engine.accumulation if num_micro_batches is None else num_micro_batches
    n = whole("num_micro_batches of forecast()", given)
    optimizer: ZeroOptimizer = engine.training("forecast")
    sends = 0
    if hasattr(runner, "drives"):
        drives = [Drive(**one) for one in runner.drives(n)]
        found = optimizer.forecast(drives, max_bytes=engine.config.pipeline.max_bytes)
        sends = runner.sent_bytes(n) or 0
    else:
        found = optimizer.forecast(micro_batches=n, reductions=reductions_of(engine.config, n))
    found = dataclasses.replace(
        found, micro_batches=n, wire_bytes={**found.wire_bytes, **({"send": sends} if sends else {})}
    )
    if hardware is None:
        return found
    seen = engine.global_samples
    seq = engine.global_tokens // seen if seq is None and seen and engine.global_tokens else seq
    shape = transformer if transformer is not None else shape_of(engine.module, seq)
    sizes = {} if engine.mesh is None else dict(zip(engine.mesh.mesh_dim_names, engine.mesh.shape, strict=True))
    stages = getattr(engine.module, "num_stages", 1)
    time = time_of(
        shape, engine.config, hardware, software, data=engine.batch_ranks, axes={**sizes, "pipe": stages},
        micro_batches=n, chunks=len(getattr(engine.module, "rank_of", ())) // stages or 1, found=found,
    )  # fmt: skip
    return dataclasses.replace(found, time=time)


def shape_of(module: nn.Module, seq: int | None) -> Transformer:
    """A transformer's shape, from its ``config``.

    Raises:
        ValueError: it has none that is known, or nobody knows how long sequences are.
    """
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(
            f"the time of a step was asked for, and a {type(module).__name__} has no config of transformers that says "
            "its shape: give transformer=zoo.cost.Transformer(...), or leave hardware out."
        )
    if seq is None:
        raise ValueError("the time of a step was asked for before the first batch: give seq=, tokens of a sequence.")
    document: dict[str, Any] = config.to_dict()
    return transformer_of(document, seq=seq)


def without_formula(config: Config, axes: Mapping[str, int]) -> list[str]:
    """The axes of a mesh, by name, of which only a run under virtual time says how long they take."""
    known = {"pipe", "tensor", *config.mesh.batch_axes}
    return sorted(name for name in set(axes) - known if axes[name] > 1)


def offloads(config: Config) -> bool:
    """Whether something is to lie outside of the device."""
    zero = config.zero_optimization
    return any(getattr(zero, name).device != "none" for name in ("offload_optimizer", "offload_param"))


def products_in(config: Config) -> str:
    """The dtype of products, as hardware files name it: that of autocast, of parameters, or fp32."""
    found = autocast_dtype(config) or compute_dtype(config)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(found, "fp32") if found is not None else "fp32"


def _otherwise(config: Config) -> list[str]:
    """What the configuration asks for that formulas take for its plain form, by key."""
    zero, again = config.zero_optimization, config.activation_checkpointing
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1, "mics_shard_size": zero.mics_shard_size > 0,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "communication_data_type": bool(config.communication_data_type),
        "sparse_gradients": config.sparse_gradients, "torch_autocast": config.torch_autocast.enabled,
        "activation_checkpointing.cpu_checkpointing": again.cpu_checkpointing,
        "activation_checkpointing.partition_activations": again.partition_activations,
        "activation_checkpointing.nvme_path": again.nvme_path is not None,
    }  # fmt: skip
    return [f"what {name} changes" for name, given in asked.items() if given]


def machine_of(hardware: str | Hardware, software: str | Software) -> tuple[Hardware, Software]:
    """Both by name or as they are.

    Raises:
        ValueError: one is not known.
    """
    if isinstance(software, str) and software not in SOFTWARE:
        raise ValueError(f"no software is named {software!r}: known are {', '.join(SOFTWARE)}.")
    return (
        hardware if isinstance(hardware, Hardware) else read_hardware(hardware),
        SOFTWARE[software] if isinstance(software, str) else software,
    )


def time_of(
    shape: Transformer, config: Config, hardware: str | Hardware, software: str | Software, *, data: int,
    axes: dict[str, int], micro_batches: int, found: Forecast, chunks: int = 1,
) -> StepTime:  # fmt: skip
    """Of a step of a job.

    Args:
        data: ranks that see other samples. axes: of the mesh, with their sizes. chunks: stages on each pipeline rank.
        found: the bytes of the step.

    Raises:
        ValueError: there is something in the job of which nobody knows how long it takes.
    """
    zero = config.zero_optimization
    others = [f"the mesh axis {name!r}" for name in without_formula(config, axes)]
    if others:
        raise ValueError(
            f"the time of a step was asked for, and there is no formula for {', '.join(others)}: zoo forecast CONFIG "
            "--hardware runs the job under virtual time, or leave hardware out."
        )
    machine, soft = machine_of(hardware, software)
    micro = int(config.train_micro_batch_size_per_gpu or 1)
    again = config.activation_checkpointing.blocks is not None or (
        axes.get("pipe", 1) > 1 and config.pipeline.activation_checkpoint_interval > 0
    )
    layout = Layout(
        global_batch=micro * micro_batches * data, micro_batch=micro, data=data, tensor=axes.get("tensor", 1),
        pipeline=axes.get("pipe", 1), chunks=chunks, stage=zero.stage, recompute="full" if again else "none",
    )  # fmt: skip
    time = step_time(shape, layout, machine, soft, dtype=products_in(config))
    computing = time.products_s + time.passes_s + time.host_s + time.tensor_s
    off = offloading(
        found, machine, forward_s=computing / 3, backward_s=computing * 2 / 3 + time.again_s,
        update_bytes=soft.update_bytes, offloads=offloads(config),
    )  # fmt: skip
    mine = max(shape.parameters / layout.tensor / layout.pipeline / (layout.data if zero.stage else 1), 1)
    here = max(1 - found.host_updated / mine, 0.0)
    return dataclasses.replace(
        time, update_s=(time.update_s - soft.step_s) * here + soft.step_s + off.host_update_s,
        offload_s=off.exposed_s, not_counted=(*off.not_counted, *_otherwise(config)),
    )  # fmt: skip
