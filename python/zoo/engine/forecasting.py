"""What a step of an engine or a configuration will cost: bytes from its plan, seconds from the shape of its model."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    read_hardware,
    step_time,
    transformer_of,
)
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
        micro_batches=n, chunks=len(getattr(engine.module, "rank_of", ())) // stages or 1,
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


def time_of(
    shape: Transformer, config: Config, hardware: str | Hardware, software: str | Software, *, data: int,
    axes: dict[str, int], micro_batches: int, chunks: int = 1,
) -> StepTime:  # fmt: skip
    """Of a step of a job.

    Args:
        data: ranks that see other samples. axes: of the mesh, with their sizes. chunks: stages on each pipeline rank.

    Raises:
        ValueError: there is something in the job of which nobody knows how long it takes.
    """
    zero = config.zero_optimization
    known = {"pipe", "tensor", *config.mesh.batch_axes}
    others = [f"the mesh axis {name!r}" for name in set(axes) - known if axes[name] > 1]
    for name in ("offload_optimizer", "offload_param"):
        others += [f"zero_optimization.{name}"] * (getattr(zero, name).device != "none")
    if others:
        raise ValueError(
            f"the time of a step was asked for, and there is no forecast of time of {', '.join(sorted(others))}: leave "
            "hardware out, or that."
        )
    if isinstance(software, str) and software not in SOFTWARE:
        raise ValueError(f"no software is named {software!r}: known are {', '.join(SOFTWARE)}.")
    micro = int(config.train_micro_batch_size_per_gpu or 1)
    again = config.activation_checkpointing.blocks is not None or (
        axes.get("pipe", 1) > 1 and config.pipeline.activation_checkpoint_interval > 0
    )
    layout = Layout(
        global_batch=micro * micro_batches * data, micro_batch=micro, data=data, tensor=axes.get("tensor", 1),
        pipeline=axes.get("pipe", 1), chunks=chunks, stage=zero.stage, recompute="full" if again else "none",
    )  # fmt: skip
    return step_time(
        shape, layout, hardware if isinstance(hardware, Hardware) else read_hardware(hardware),
        SOFTWARE[software] if isinstance(software, str) else software,
    )  # fmt: skip
