"""Seconds of a training step, contenders in turn in one process group; and the memory of one in fresh processes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch.distributed as dist
from benchmarks.pipe.contenders import BOTH, CONTENDERS, SERIAL, NotMeasuredError, Step
from benchmarks.pipe.model import Shape
from benchmarks.process import reset_peak, status_bytes, warm_up
from benchmarks.turns import turn
from torch.profiler import ProfilerActivity, profile

NUM_CHECKED = 2
"""Steps whose losses are compared before anything is timed."""
TOLERANCE = 1e-4
NUM_MEMORY_STEPS = 3


def measure(shape: Shape, rounds: int, names: list[str], rank: int) -> dict[str, Any]:
    """CPU and wall seconds of every contender in every round on this rank, and its losses of the first steps."""
    steps: dict[str, Step] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = CONTENDERS[name].load()(shape)
        except NotMeasuredError as error:
            left_out[name] = str(error)
    taken = dict.fromkeys(steps, 0)

    def timed(name: str) -> tuple[float, float, float | None]:
        data = shape.data(taken[name])
        taken[name] += 1
        dist.barrier()
        if name == SERIAL and rank > 0:
            return 0.0, 0.0, None
        cpu, wall = time.process_time(), time.perf_counter()
        loss = steps[name](data)
        return time.process_time() - cpu, time.perf_counter() - wall, loss

    losses = {name: [timed(name)[2] for _ in range(NUM_CHECKED)] for name in steps}
    seconds: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "wall": []} for name in steps}
    order = list(steps)
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            with turn():
                timed(name)  # caches and free memory are then as a step of the same contender leaves them
                cpu, wall, _ = timed(name)
            seconds[name]["cpu"].append(cpu / 2 if name == BOTH else cpu)
            seconds[name]["wall"].append(wall)
    dist.barrier()
    return {"shape": shape.record(), "seconds": seconds, "losses": losses, "left_out": left_out}


def check_losses(ranks: list[dict[str, Any]]) -> None:
    """Raise AssertionError where a contender trains something else than the serial model."""
    expected = ranks[0]["losses"][SERIAL]
    for rank, found in enumerate(ranks):
        for name, losses in found["losses"].items():
            for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
                if loss is not None and abs(loss - wanted) > TOLERANCE * wanted:
                    raise AssertionError(f"{name}, rank {rank}, step {step}: a loss of {loss}, serial {wanted}")


def measure_memory(shape: Shape, name: str, tensors: bool) -> dict[str, Any]:
    """Growth of the resident set at its peak, from before the model is built to the last of some steps; or with
    ``tensors`` the bytes that tensors had at their peak, as torch's allocator counts them: the same in every run.

    A small model is trained first, so that what a library imports late does not count.
    """
    try:
        build = CONTENDERS[name].load()
    except NotMeasuredError as error:
        return {"left_out": str(error)}
    warm_up()
    small = Shape(layers=shape.layers, width=16, heads=shape.heads, context=8, batch=1)
    build(small)(small.data(0))

    def train() -> None:
        step = build(shape)
        for number in range(NUM_MEMORY_STEPS):
            step(shape.data(number))

    if not tensors:
        before = reset_peak()
        train()
        return {"peak": status_bytes("VmHWM") - before}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train()
    changes = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda e: e.start_ns())
    return {"tensors": max(itertools.accumulate(e.nbytes() for e in changes))}
