"""Expert parallelism on 2 gloo ranks: seconds of a step, contenders in turn, and what zoo sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.moe.contenders import NotMeasuredError, deepspeed_layer, zoo_layer
from benchmarks.moe.shapes import Shape, Weights, choices, gradient, tokens
from benchmarks.moe.speed import Step, step_of, tolerance
from benchmarks.turns import turn

Tensor = torch.Tensor
Layer = Callable[[Tensor], Tensor]

COUNT_BYTES = 8
"""Of a number of rows: int64."""


def _zoo(chunks: int) -> Callable[[Shape, Weights, int], Any]:
    def build(shape: Shape, weights: Weights, rank: int) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        size = dist.get_world_size()
        layer = zoo_layer(shape, weights, ep_size=size, ep_rank=rank, chunks=chunks)
        layer.enter_mesh(init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "expert")))
        return layer

    return build


def _deepspeed(**options: Any) -> Callable[[Shape, Weights, int], Any]:
    def build(shape: Shape, weights: Weights, rank: int) -> Any:
        return deepspeed_layer(shape, weights, ep_size=dist.get_world_size(), ep_rank=rank, **options)

    return build


CONTENDERS: dict[str, Callable[[Shape, Weights, int], Any]] = {
    "zoo": _zoo(1),
    "zoo, 2 chunks": _zoo(2),
    "DeepSpeed": _deepspeed(drop_tokens=False),
    "DeepSpeed, capacity": _deepspeed(),
}


def sent_by_a_rank(shape: Shape, routings: list[Tensor], rank: int) -> int:
    """Bytes that have to leave this rank in forward and backward: (T, k) choices of each rank say whose rows go where.

    Rows go to their experts and outputs come back, and the same with gradients: 2 (rows that leave + rows that come)
    D numbers; and how many rows of each expert there are. A token with two experts on another rank is two rows.
    """
    mine = shape.experts // len(routings)
    leave = int((routings[rank] // mine != rank).sum())
    come = sum(int((other // mine == rank).sum()) for at, other in enumerate(routings) if at != rank)
    return 2 * (leave + come) * shape.width * shape.itemsize + (len(routings) - 1) * mine * COUNT_BYTES


def measure(shape: Shape, routing: str, rounds: int, names: list[str], rank: int) -> dict[str, Any]:
    """Seconds of every contender in every round, and of zoo bytes: as counted, and as they have to be."""
    size = dist.get_world_size()
    weights, dy = Weights.of(shape), gradient(shape, seed=rank)
    x = tokens(shape, routing, seed=rank).requires_grad_()
    expected = sent_by_a_rank(shape, [choices(shape, routing, seed=r) for r in range(size)], rank)
    steps: dict[str, Step] = {}
    left_out: dict[str, str] = {}
    bytes_sent: dict[str, list[int]] = {}
    logs: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    for name in names:
        try:
            layer = CONTENDERS[name](shape, weights, rank)
        except NotMeasuredError as error:
            left_out[name] = str(error)
            continue
        if name.startswith("zoo"):
            logs[name] = layer.expert_ranks.log
        steps[name] = step_of(_forward(layer, name), list(layer.parameters()), x, dy)
        outputs[name] = _forward(layer, name)(x.detach()).float()
    for name in outputs:
        if "capacity" not in name:
            error = float((outputs[name] - outputs["zoo"]).norm() / outputs["zoo"].norm())
            assert error <= tolerance(shape), f"{name}: the output differs by {error:.2g} of its norm"
    seconds: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in steps}
    for number in range(-1, rounds):
        for name in list(steps)[number % len(steps) :] + list(steps)[: number % len(steps)]:
            if name in logs:
                logs[name].reset()
            with turn():
                dist.barrier()
                began, cpu_began = time.perf_counter(), time.process_time()
                steps[name]()
                cpu, wall = time.process_time() - cpu_began, time.perf_counter() - began
            if name in logs:
                bytes_sent[name] = [logs[name].wire_bytes, expected]
            if number >= 0:
                seconds[name]["cpu"].append(cpu)
                seconds[name]["wall"].append(wall)
    return {"shape": shape.record(), "routing": routing, "left_out": left_out, "seconds": seconds, "bytes": bytes_sent}


def _forward(layer: Any, name: str) -> Layer:
    if name.startswith("zoo"):
        return lambda x: layer(x).output
    return lambda x: layer(x.unsqueeze(0))[0].squeeze(0)
