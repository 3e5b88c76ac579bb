"""What each rank of test_gloo.py does, in a process of its own that has joined the group."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zoo.zero import ZeroOptimizer

NUM_STEPS = 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Embedding(32, 24)]
    for _ in range(4):
        layers += [nn.Linear(24, 24), nn.LayerNorm(24), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(24, 32))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 32, (16,), generator=generator), torch.randint(0, 32, (16,), generator=generator)


def train_ddp(rank: int, num_steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    model = make_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def train_zoo(
    rank: int, stage: int, check: bool, num_steps: int = NUM_STEPS, **options: Any
) -> dict[str, torch.Tensor]:
    model = make_model()
    base = {"clip_norm": 1.0, "param_persistence_threshold": 100, "reduce_bucket_size": 700}
    optimizer = ZeroOptimizer(model, stage=stage, lr=1e-3, check=check, **{**base, **options})
    for step in range(num_steps):
        x, y = batch(rank, step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.consolidated_parameters()


def equality(rank: int) -> dict[str, float]:
    """The largest difference of any parameter between DDP and each stage, after 20 steps."""
    expected = train_ddp(rank)
    found = {}
    for stage in range(4):
        got = train_zoo(rank, stage, check=stage % 2 == 1)
        found[str(stage)] = max(float((got[n] - expected[n]).abs().max()) for n in expected)
    return found


def axes(rank: int) -> dict[str, float]:
    """The largest difference of any parameter from DDP, or from plain stage 3, after 5 steps on 2 nodes of 2 ranks."""
    expected = train_ddp(rank, 5)
    plain = train_zoo(rank, 3, False, 5)

    def away(other: dict[str, torch.Tensor], stage: int, **options: Any) -> float:
        got = train_zoo(rank, stage, len(options) % 2 == 1, 5, ranks_per_node=2, max_live_parameters=0, **options)
        return max(float((got[n] - other[n]).abs().max()) for n in other)

    return {
        "all-reduce": away(expected, 0, hierarchical_all_reduce=True),
        "mics": away(expected, 3, mics_shard_size=2),
        "two stages": away(plain, 3, mics_hierarchical_params_gather=True),
        "hpz": away(plain, 3, zero_hpz_partition_size=2),
        "quantised": away(
            plain, 3, zero_hpz_partition_size=2, zero_quantized_weights=True, zero_quantized_gradients=True,
            mics_hierarchical_params_gather=True,
        ),
    }  # fmt: skip


def budget(rank: int, folder: str) -> dict[str, Any]:
    """The account of the node's host memory while both ranks hold a buffer, and after a training under the cap."""
    offload: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    capped = {**offload, "offload_host_bytes": 5 << 20, "ranks_per_node": 2}
    optimizer = ZeroOptimizer(make_model(), stage=3, lr=1e-3, **capped)
    scratch: Any = optimizer.sharded.scratch
    held = scratch.pool.empty(100 * (rank + 1) * 1024, dtype=torch.uint8)
    dist.barrier()
    found = {"stats": scratch._budget.ledger.stats(), "own": scratch.pool.stats().reserved_bytes}
    dist.barrier()
    del held
    expected, got = train_zoo(rank, 3, False, 3, **offload), train_zoo(rank, 3, False, 3, **capped)
    return {**found, "equal": all(torch.equal(got[n], expected[n]) for n in expected)}


def dies(rank: int) -> dict[str, float]:
    """Rank 1 dies in the middle of a step; the other reports how soon it noticed."""
    model = make_model()
    optimizer = ZeroOptimizer(model, stage=3, lr=1e-3, param_persistence_threshold=0)
    for step in range(3):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        if rank == 1 and step == 1:
            os._exit(9)
        start = time.monotonic()
        try:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError:
            return {"noticed_s": time.monotonic() - start}
    return {"noticed_s": float("inf")}


def stalls(rank: int) -> dict[str, float]:
    """Rank 1 stops answering without dying."""
    model = make_model()
    optimizer = ZeroOptimizer(model, stage=2, lr=1e-3)
    x, y = batch(rank, 0)
    loss = F.cross_entropy(model(x), y)
    if rank == 1:
        time.sleep(9)
        os._exit(0)
    start = time.monotonic()
    try:
        loss.backward()
        optimizer.step()
    except RuntimeError:
        return {"noticed_s": time.monotonic() - start}
    return {"noticed_s": float("inf")}


def mismatch(rank: int) -> dict[str, str]:
    """With check=True ranks that run different modules get an error instead of waiting for each other."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 5)
    model = nn.ModuleList([first, second])
    optimizer = ZeroOptimizer(model, stage=3, lr=1e-3, param_persistence_threshold=0, reduce_bucket_size=1, check=True)
    try:
        (first if rank == 0 else second)(torch.ones(1, 3))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": f"none on rank {rank} of {optimizer.comm.size}"}
