"""Who trains: the model in one process, zoo's pipelines, those of torch and DeepSpeed. All with torch's own AdamW."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.pipe.model import Batch, Layer, Shape, cross_entropy
from torch import nn

LR = 1e-3
Step = Callable[[Sequence[Batch]], "float | None"]
"""One training step on its micro-batches; returns their mean loss on ranks that know it."""
SERIAL, BOTH = "serial", "serial, on both ranks at once"


class NotMeasuredError(RuntimeError):
    """Why a contender is left out."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``load`` imports its library and returns what builds the step. ``chunks``: stages of a rank."""

    load: Callable[[], Callable[[Shape], Step]]
    peer: bool = False
    chunks: int = 1


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR)


def _serial() -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        model = shape.model()
        optimizer = _adamw(model.parameters())

        def step(batches: Sequence[Batch]) -> float:
            total = torch.zeros(())
            for x, y in batches:
                loss = cross_entropy(model(x), y)
                (loss / len(batches)).backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return float(total) / len(batches)

        return step

    return build


def zoo_engine(shape: Shape, schedule: Any) -> Any:
    """The model in a pipeline over all ranks."""
    import zoo.engine
    from zoo.pipe.module import PipelineModule
    from zoo.pipe.specs import LayerSpec

    model = PipelineModule(
        [LayerSpec(Layer, *shape.arguments(number)) for number in range(shape.layers)],
        num_stages=dist.get_world_size(), loss_fn=cross_entropy, partition_method="uniform", schedule=schedule,
    )  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": shape.batch, "gradient_accumulation_steps": shape.micro_batches,
        "train_batch_size": shape.batch * shape.micro_batches,
    }  # fmt: skip
    return zoo.engine.initialize(config, model, optimizer=_adamw)[0]


def _zoo(schedule: str) -> Callable[[], Callable[[Shape], Step]]:
    def load() -> Callable[[Shape], Step]:
        import zoo.engine
        import zoo.pipe.module
        import zoo.pipe.runtime.runner  # noqa: F401

        def build(shape: Shape) -> Step:
            engine = zoo_engine(shape, schedule)
            return lambda batches: float(engine.train_batch(iter(batches)))

        return build

    return load


def _torch(name: str, chunks: int = 1) -> Callable[[], Callable[[Shape], Step]]:
    def load() -> Callable[[Shape], Step]:
        import torch.distributed.pipelining as pipelining

        def build(shape: Shape) -> Step:
            rank, size = dist.get_rank(), dist.get_world_size()
            num_stages = size * chunks
            stages, optimizers = [], []
            for number in range(rank, num_stages, size):
                bounds = [s * shape.layers // num_stages for s in (number, number + 1)]
                model = nn.Sequential(*[Layer(*shape.arguments(n)) for n in range(*bounds)])
                stages.append(pipelining.PipelineStage(model, number, num_stages, torch.device("cpu")))
                optimizers.append(_adamw(model.parameters()))
            made: Any = getattr(pipelining, name)
            schedule = made(stages[0] if chunks == 1 else stages, shape.micro_batches, loss_fn=cross_entropy)

            def step(batches: Sequence[Batch]) -> float | None:
                losses: list[torch.Tensor] = []
                if rank == 0:
                    schedule.step(torch.cat([x for x, _ in batches]))
                elif rank == size - 1:
                    schedule.step(target=torch.cat([y for _, y in batches]), losses=losses)
                else:
                    schedule.step()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                return float(torch.stack(losses).mean()) if losses else None

            return step

        return build

    return load


def _deepspeed() -> Callable[[Shape], Step]:
    from benchmarks.zero.contenders import import_deepspeed

    try:
        deepspeed = import_deepspeed()
        from deepspeed.pipe import LayerSpec, PipelineModule
    except ImportError as error:
        raise NotMeasuredError("DeepSpeed is not installed") from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    def build(shape: Shape) -> Step:
        model = PipelineModule(
            [LayerSpec(Layer, *shape.arguments(number)) for number in range(shape.layers)],
            num_stages=dist.get_world_size(), loss_fn=cross_entropy, partition_method="uniform",
        )  # fmt: skip
        config = {
            "train_micro_batch_size_per_gpu": shape.batch, "gradient_accumulation_steps": shape.micro_batches,
            "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, optimizer=_adamw(model.parameters()), config=config)[0]
        return lambda batches: float(engine.train_batch(data_iter=iter(batches)))

    return build


CONTENDERS: dict[str, Contender] = {
    SERIAL: Contender(load=_serial),
    BOTH: Contender(load=_serial),
    "zoo 1F1B": Contender(load=_zoo("1f1b")),
    "zoo interleaved": Contender(load=_zoo("interleaved_1f1b"), chunks=2),
    "torch 1F1B": Contender(load=_torch("Schedule1F1B"), peer=True),
    "torch GPipe": Contender(load=_torch("ScheduleGPipe"), peer=True),
    "torch interleaved": Contender(load=_torch("ScheduleInterleaved1F1B", 2), peer=True, chunks=2),
    "DeepSpeed": Contender(load=_deepspeed, peer=True),
}
