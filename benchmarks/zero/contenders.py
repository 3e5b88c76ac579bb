"""Who trains: each contender wraps the same model with the same AdamW its own way.

``load`` imports a contender's library, so that the memory of imports is in the baseline; what it returns builds the
training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common import refuse_standin
from benchmarks.zero.workloads import Workload
from torch import nn

LR = 1e-3
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]
Builder = Callable[[Workload], Step]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """``stage``: the ZeRO stage whose memory it is compared at; ``peer``: another project's implementation."""

    label: str
    setting: str
    load: Callable[[], Builder]
    stage: int | None = None
    peer: bool = False
    needs: str = ""


def train_step(model: Callable[[torch.Tensor], torch.Tensor], optimizer: Any, workload: Workload) -> Step:
    """Forward, backward, update."""

    def step(batch: Batch) -> torch.Tensor:
        loss = workload.loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _plain() -> Builder:
    def build(workload: Workload) -> Step:
        model = workload.model()
        return train_step(model, torch.optim.AdamW(model.parameters(), lr=LR), workload)

    return build


def _ddp(*, view: bool = False, sharded: bool = False) -> Builder:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    def build(workload: Workload) -> Step:
        model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=view)
        optimizer: Any
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        return train_step(model, optimizer, workload)

    return build


def _zoo(stage: int) -> Builder:
    from zoo.zero import ZeroOptimizer

    def build(workload: Workload) -> Step:
        model = workload.model()
        return train_step(model, ZeroOptimizer(model, stage=stage, optimizer=torch.optim.AdamW, lr=LR), workload)

    return build


def _fsdp2(reshard: bool) -> Builder:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def build(workload: Workload) -> Step:
        model = workload.model()
        for block in workload.blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return train_step(model, torch.optim.AdamW(model.parameters(), lr=LR), workload)

    return build


def import_deepspeed() -> Any:
    """deepspeed on the CPU, over the process group that exists, saying little."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    refuse_standin()
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def deepspeed_engine(deepspeed: Any, model: nn.Module, stage: int, **zero: Any) -> Any:
    """``deepspeed.initialize`` with torch's own AdamW, fp32, no clipping, and defaults for the rest."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def engine_step(engine: Any, workload: Workload) -> Step:
    """The same with an engine of DeepSpeed."""

    def step(batch: Batch) -> torch.Tensor:
        loss = workload.loss(engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _deepspeed(stage: int) -> Builder:
    deepspeed = import_deepspeed()

    def build(workload: Workload) -> Step:
        return engine_step(deepspeed_engine(deepspeed, workload.model(), stage), workload)

    return build


def _bare() -> Builder:
    from benchmarks.zero.bare import bare_loop

    def build(workload: Workload) -> Step:
        model = workload.model()
        model, shards = bare_loop(model, workload.blocks(model))
        return train_step(model, torch.optim.AdamW(shards, lr=LR), workload)

    return build


CONTENDERS: dict[str, Contender] = {
    "plain": Contender(
        label="unsharded", load=_plain,
        setting="plain torch, no communication; beside world 2 two of them run at once",
    ),
    "ddp": Contender(label="DDP", load=_ddp, setting="DistributedDataParallel, defaults", stage=0, peer=True),
    "ddp-view": Contender(
        label="DDP, bucket view", load=lambda: _ddp(view=True), stage=0, peer=True,
        setting="DistributedDataParallel(gradient_as_bucket_view=True)",
    ),
    "ddp-zero": Contender(
        label="DDP + ZeroRedundancyOptimizer", load=lambda: _ddp(sharded=True), stage=1, peer=True,
        setting="DistributedDataParallel, torch.distributed.optim.ZeroRedundancyOptimizer, defaults",
    ),
    **{
        f"zoo{s}": Contender(
            label=f"zoo stage {s}", load=lambda s=s: _zoo(s), stage=s, setting=f"zoo.zero.Stage{s}Optimizer, defaults",
        )
        for s in range(4)
    },
    "fsdp2-keep": Contender(
        label="FSDP2, no reshard", load=lambda: _fsdp2(False), stage=2, peer=True,
        setting="fully_shard on each block and the root, reshard_after_forward=False",
    ),
    "fsdp2": Contender(
        label="FSDP2", load=lambda: _fsdp2(True), stage=3, peer=True,
        setting="fully_shard on each block and the root, reshard_after_forward=True",
    ),
    **{
        f"ds{s}": Contender(
            label=f"DeepSpeed stage {s}", load=lambda s=s: _deepspeed(s), stage=s, peer=True, needs="deepspeed",
            setting=f"deepspeed.initialize, stage {s}, fp32, torch AdamW, gradient_clipping 0, rest default",
        )
        for s in (1, 2, 3)
    },
    "bare": Contender(
        label="bare loop", load=_bare, stage=3,
        setting="bare.py: all_gather_into_tensor and reduce_scatter_tensor around each block by hand",
    ),
}  # fmt: skip
