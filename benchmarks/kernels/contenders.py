"""AdamW steps of zoo and its peers, each a function without arguments over tensors of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zoo.optim import AdamW

Tensors = list[torch.Tensor]
OPTIONS: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.01}
STEP = Callable[[], Any]


def normal(sizes: Sequence[int], dtype: torch.dtype) -> Tensors:
    """Normal numbers, every list from the same seed: filled in blocks, since making 10^8 of them takes a second."""
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = []
    for size in sizes:
        t = torch.empty(size, dtype=dtype)
        for at in range(0, size, block.numel()):
            t[at : at + block.numel()] = block[: size - at]
        made.append(t)
    return made


def parameters(sizes: Sequence[int], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    made = [torch.nn.Parameter(t) for t in normal(sizes, dtype)]
    for p, g in zip(made, normal(sizes, dtype), strict=True):
        p.grad = g
    return made


def deepspeed_adam() -> Any:
    """DeepSpeedCPUAdam, compiled on its first use; None where DeepSpeed is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam


def fp32_steps(sizes: Sequence[int]) -> tuple[dict[str, STEP], list[Tensors]]:
    """Contender → step, and zoo's (p, g, m, v) for the yardstick."""
    ours = parameters(sizes, torch.float32)
    optimizer = AdamW(ours, **OPTIONS)
    optimizer.step()
    steps: dict[str, STEP] = {"zoo": optimizer.step}
    steps["torch fused"] = torch.optim.AdamW(parameters(sizes, torch.float32), fused=True, **OPTIONS).step
    adam = deepspeed_adam()
    if adam is not None:
        steps["DeepSpeedCPUAdam"] = adam(parameters(sizes, torch.float32), adamw_mode=True, **OPTIONS).step
    states = [optimizer.state[p] for p in ours]
    lists: list[Tensors] = [
        [p.detach() for p in ours], [p.grad for p in ours if p.grad is not None], [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
    ]  # fmt: skip
    return steps, lists


def mixed_steps(sizes: Sequence[int]) -> tuple[dict[str, STEP], list[Tensors]]:
    """The mixed step: bf16 gradients, fp32 masters and moments, bf16 parameters. The peers need three passes for it."""
    ours = parameters(sizes, torch.bfloat16)
    optimizer = AdamW(ours, **OPTIONS)
    optimizer.step()
    steps: dict[str, STEP] = {"zoo": optimizer.step}
    steps["torch fused"] = three_passes(sizes, lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS))
    adam = deepspeed_adam()
    if adam is not None:
        steps["DeepSpeedCPUAdam"] = three_passes(sizes, lambda p: adam(p, adamw_mode=True, **OPTIONS))
    states = [optimizer.state[p] for p in ours]
    lists: list[Tensors] = [
        [p.detach() for p in ours], [p.grad for p in ours if p.grad is not None], [s["master"] for s in states],
        [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states],
    ]  # fmt: skip
    return steps, lists


def three_passes(sizes: Sequence[int], build: Callable[[Any], Any]) -> STEP:
    """Gradients to fp32, the step on the masters, masters back to bf16: each a multi-tensor call of torch."""
    low = parameters(sizes, torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in low]
    for p in masters:
        p.grad = torch.empty_like(p)
    optimizer = build(masters)
    low_grads = [p.grad for p in low]
    grads = [p.grad for p in masters]
    values, sources = [p.detach() for p in low], [p.detach() for p in masters]

    def step() -> None:
        torch._foreach_copy_(grads, low_grads)
        optimizer.step()
        torch._foreach_copy_(values, sources)

    return step
