"""Section 4: bytes of model states a rank against the formula of Rajbhandari et al. 2020, section 5.

Parameters Ψ in bf16 (2 bytes), gradients in bf16 (2), K = 12 for AdamW (fp32 master, first and second moment), N ranks:
stage 0 (2+2+K)Ψ, stage 1 (2+2+K/N)Ψ, stage 2 (2+(2+K)/N)Ψ, stage 3 (2+2+K)Ψ/N.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from benchmarks.process import reset_peak, status_bytes, warm_up
from benchmarks.zero.workloads import WORKLOADS

K = 12


def formula_bytes(stage: int, num_parameters: int, num_ranks: int) -> float:
    """Model states a rank."""
    n = num_ranks
    per_parameter = (2 + 2 + K, 2 + 2 + K / n, 2 + (2 + K) / n, (2 + 2 + K) / n)[stage]
    return per_parameter * num_parameters


def measure_states(stage: int, rank: int) -> dict[str, Any]:
    """The largest ``optimizer.memory()["total"]`` over the steps, looked at after every change of a storage's size.

    Storages are resized when a bucket is gathered, released, opened for gradients or freed, so between two looks no
    model state comes or goes unseen, except what is allocated outright: reduced gradient shards, which the next resize
    sees, and optimizer states, seen from inside the wrapped optimizer's step.
    """
    from zoo.zero import ZeroOptimizer

    workload = WORKLOADS["states"]
    warm_up()
    before = reset_peak()
    model = workload.model()
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.AdamW, lr=1e-3, param_persistence_threshold=0)
    peak: dict[str, int] = {"total": 0}
    num_looks = 0

    def look(*_: Any) -> None:
        nonlocal peak, num_looks
        num_looks += 1
        now = optimizer.memory()
        if now["total"] > peak["total"]:
            peak = dict(now)

    resize = torch.UntypedStorage.resize_

    def resize_and_look(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        look()
        return result

    torch.UntypedStorage.resize_ = resize_and_look  # type: ignore[method-assign]
    for block in workload.blocks(model):
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    optimizer.inner.register_step_pre_hook(look)
    optimizer.inner.register_step_post_hook(look)
    for i in range(workload.num_steps):
        x, y = workload.batch(rank, i)
        workload.loss(model(x), y).backward()
        optimizer.step()
        look()
        optimizer.zero_grad()
    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    growth = status_bytes("VmHWM") - before
    expected = formula_bytes(stage, num_parameters, dist.get_world_size())
    return {"peak": peak, "formula_bytes": expected, "rss_growth_bytes": growth, "num_parameters": num_parameters,
            "num_looks": num_looks}  # fmt: skip
