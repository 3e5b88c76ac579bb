"""Section 1: host time of gathering and releasing one unit, world 1, one thread.

(CPU time of a forward of the wrapped model - CPU time of a forward of the same model, plain) / number of units, both
under no_grad and in one process; each the median over passes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.turns import turn
from benchmarks.zero.contenders import deepspeed_engine, import_deepspeed
from benchmarks.zero.workloads import NUM_TINY, TINY_WIDTH, WORKLOADS
from torch import nn

HOST_CONTENDERS = {
    "zoo": ("zoo stage 3", "param_persistence_threshold=0, reduce_bucket_size=1: a bucket for every unit"),
    "fsdp2": ("FSDP2", "fully_shard on each Linear and the root, mesh of one rank, gloo"),
    "deepspeed": ("DeepSpeed stage 3", "param_persistence_threshold=0, all other options default, gloo"),
    "bare": ("bare loop, copy", "storage.resize_, copy_, forward, resize_(0)"),
    "bare-gloo": ("bare loop, gloo", "storage.resize_, all_gather_into_tensor, forward, resize_(0)"),
}
NUM_PASSES, NUM_WARMUP = 30, 5

Forward = Callable[[torch.Tensor], torch.Tensor]
Resident = Callable[[], int]


def _zoo(model: nn.Sequential) -> tuple[Forward, Resident]:
    from zoo.zero import Stage3Optimizer

    optimizer = Stage3Optimizer(
        model, units=[nn.Linear], param_persistence_threshold=0, reduce_bucket_size=1, optimizer=torch.optim.AdamW
    )
    buckets = optimizer.buckets
    if len(buckets) != NUM_TINY or any(b.spec.resident for b in buckets):
        raise AssertionError(f"{len(buckets)} buckets for {NUM_TINY} units: persistence or coalescing is not off.")

    def resident() -> int:
        # A bucket that is being gathered ahead has memory and is not live yet.
        if any(b.parameters.live and b.parameters.full.untyped_storage().nbytes() == 0 for b in buckets):
            raise AssertionError("a bucket is live without memory.")
        return sum(b.parameters.full.untyped_storage().nbytes() > 0 for b in buckets)

    return model, resident


def _fsdp2(model: nn.Sequential) -> tuple[Forward, Resident]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model, lambda: sum(not hasattr(layer.weight, "placements") for layer in model)


def _deepspeed(model: nn.Sequential) -> tuple[Forward, Resident]:
    deepspeed = import_deepspeed()
    # Asking a module for its parameter inside a forward would gather it: the parameters themselves are asked.
    weights = [layer.weight for layer in model]
    engine = deepspeed_engine(deepspeed, model, 3, stage3_param_persistence_threshold=0)
    engine.eval()
    return engine, lambda: sum(weight.numel() > 0 for weight in weights)


def _bare(model: nn.Sequential, *, collective: bool) -> tuple[Forward, Resident]:
    fulls, shards = [], []
    for layer in model:
        full = torch.cat([layer.weight.data.flatten(), layer.bias.data])
        layer.weight.data = full[: layer.weight.numel()].view_as(layer.weight)
        layer.bias.data = full[layer.weight.numel() :]
        fulls.append(full)
        shards.append(full.clone())
        full.untyped_storage().resize_(0)
    units = [(layer, f, f.untyped_storage(), s, s.nbytes) for layer, f, s in zip(model, fulls, shards, strict=True)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer, full, storage, shard, num_bytes in units:
            storage.resize_(num_bytes)
            if collective:
                dist.all_gather_into_tensor(full, shard)
            else:
                full.copy_(shard)
            x = layer(x)
            storage.resize_(0)
        return x

    return forward, lambda: sum(f.untyped_storage().nbytes() > 0 for f in fulls)


_BUILDERS: dict[str, Callable[[nn.Sequential], tuple[Forward, Resident]]] = {
    "zoo": _zoo,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "bare": lambda model: _bare(model, collective=False),
    "bare-gloo": lambda model: _bare(model, collective=True),
}


def _verify(model: nn.Sequential, forward: Forward, resident: Resident, x: torch.Tensor, plain: nn.Sequential) -> int:
    """Every unit starts and ends empty and is whole in its own forward; returns the most that were whole at once."""
    counts: list[int] = []
    hooks = [layer.register_forward_pre_hook(lambda *_: counts.append(resident())) for layer in model]
    before = resident()
    result = forward(x)
    after = resident()
    for hook in hooks:
        hook.remove()
    if before or after or min(counts) < 1:
        raise AssertionError(f"whole units: {before} before, {after} after, at least {min(counts)} in forward.")
    if not torch.equal(result, plain(x)):
        raise AssertionError("the wrapped model computes something else than the plain one.")
    return max(counts)


def _times(forward: Forward, x: torch.Tensor) -> dict[str, list[float]]:
    """ "cpu" and "wall" seconds of each forward."""
    cpu, wall = [], []
    for i in range(NUM_WARMUP + NUM_PASSES):
        with turn():
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            forward(x)
            if i >= NUM_WARMUP:
                cpu.append(time.process_time() - cpu_start)
                wall.append(time.perf_counter() - wall_start)
    return {"cpu": cpu, "wall": wall}


def _time(forward: Forward, x: torch.Tensor) -> tuple[float, float]:
    """(CPU, wall) seconds of a forward, medians over passes."""
    times = _times(forward, x)
    return statistics.median(times["cpu"]), statistics.median(times["wall"])


@torch.no_grad()
def measure_host(contender: str) -> dict[str, Any]:
    """CPU time a unit; and the most units that were whole at once."""
    workload = WORKLOADS["tiny"]
    plain = workload.model()
    model = copy.deepcopy(plain)
    x = torch.randn(1, TINY_WIDTH, generator=torch.Generator().manual_seed(0))
    # Before anything is wrapped: DeepSpeed replaces functions of torch, which slows the plain model too.
    plain_cpu, plain_wall = _time(plain, x)
    forward, resident = _BUILDERS[contender](model)
    for _ in range(2):
        forward(x)  # what only a first pass does: tracing, recording orders
    most = _verify(model, forward, resident, x, plain)
    cpu, wall = _time(forward, x)
    return {
        "cpu_s": (cpu - plain_cpu) / NUM_TINY,
        "wall_s": (wall - plain_wall) / NUM_TINY,
        "plain_cpu_s": plain_cpu / NUM_TINY,
        "most_whole": most,
    }


def measure_unit(stage: int) -> dict[str, Any]:
    """Host time a unit of forward and backward with gradients, world 1: of the hooks, at any stage.

    Every Linear is a unit. The figures are of all of forward and backward, divided by the number of units, without
    taking the plain model's away: the difference of two figures is that of the hooks.
    """
    from zoo.zero import ZeroOptimizer

    model = WORKLOADS["tiny"].model()
    options = {"param_persistence_threshold": 0, "reduce_bucket_size": 1} if stage == 3 else {}
    optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.AdamW, units=[nn.Linear], **options)
    x = torch.randn(1, TINY_WIDTH, generator=torch.Generator().manual_seed(0))

    def both(x: torch.Tensor) -> torch.Tensor:
        result = model(x).sum()
        with optimizer.no_sync():
            result.backward()
        return result

    times = _times(both, x)
    cpu, wall = (statistics.median(times[key]) / NUM_TINY for key in ("cpu", "wall"))
    return {"cpu_s": cpu, "wall_s": wall, "by_step": times}
