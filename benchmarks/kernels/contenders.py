"""AdamW steps of zoo and its peers, each a function without arguments over tensors of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from benchmarks.common import refuse_standin

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
    refuse_standin()
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return None
    return DeepSpeedCPUAdam


def fp32_steps(sizes: Sequence[int]) -> tuple[dict[str, STEP], list[Tensors]]:
    """Contender → step, and the (p, g, m, v) that all of them and the yardstick work on.

    The same memory for all: where the pages of a tensor happen to lie moves its bandwidth by up to 15 %, here more than
    the code does.
    """
    params = parameters(sizes, torch.float32)
    ours = AdamW(params, **OPTIONS)
    ours.step()
    steps: dict[str, STEP] = {"zoo": ours.step}
    steps["torch fused"] = on_states_of(ours, torch.optim.AdamW(params, fused=True, **OPTIONS), params)
    adam = deepspeed_adam()
    if adam is not None:
        steps["DeepSpeedCPUAdam"] = on_states_of(ours, adam(params, adamw_mode=True, **OPTIONS), params)
    states = [ours.state[p] for p in params]
    lists: list[Tensors] = [
        [p.detach() for p in params], [p.grad for p in params if p.grad is not None], [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
    ]  # fmt: skip
    return steps, lists


def on_states_of(ours: Any, peer: Any, params: Sequence[torch.Tensor]) -> STEP:
    """The step of ``peer`` on the moments of ``ours``."""
    peer.step()
    for p in params:
        for name in ("exp_avg", "exp_avg_sq"):
            peer.state[p][name] = ours.state[p][name]
    step: STEP = peer.step
    return step


def mixed_steps(sizes: Sequence[int]) -> tuple[dict[str, STEP], list[Tensors]]:
    """The mixed step: bf16 gradients, fp32 masters and moments, bf16 parameters. The peers need three passes for it.

    All work on the same memory, except for the fp32 gradients that only the peers need.
    """
    params = parameters(sizes, torch.bfloat16)
    ours = AdamW(params, **OPTIONS)
    ours.step()
    steps: dict[str, STEP] = {"zoo": ours.step}
    steps["torch fused"] = three_passes(ours, params, lambda p: torch.optim.AdamW(p, fused=True, **OPTIONS))
    adam = deepspeed_adam()
    if adam is not None:
        steps["DeepSpeedCPUAdam"] = three_passes(ours, params, lambda p: adam(p, adamw_mode=True, **OPTIONS))
    states = [ours.state[p] for p in params]
    lists: list[Tensors] = [
        [p.detach() for p in params], [p.grad for p in params if p.grad is not None], [s["master"] for s in states],
        [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states],
    ]  # fmt: skip
    return steps, lists


def three_passes(ours: Any, low: Sequence[torch.Tensor], build: Callable[[Any], Any]) -> STEP:
    """Gradients to fp32, the step on the masters, masters back to bf16: each a multi-tensor call of torch."""
    masters = [torch.nn.Parameter(ours.state[p]["master"]) for p in low]
    for p in masters:
        p.grad = torch.zeros_like(p)
    optimizer = build(masters)
    optimizer.step()
    for p, master in zip(low, masters, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[master][name] = ours.state[p][name]
    low_grads = [p.grad for p in low]
    grads = [p.grad for p in masters]
    values, sources = [p.detach() for p in low], [p.detach() for p in masters]

    def step() -> None:
        torch._foreach_copy_(grads, low_grads)
        optimizer.step()
        torch._foreach_copy_(values, sources)

    return step
