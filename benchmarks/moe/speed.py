"""Forward and backward of every contender in one process, taking turns: CPU and wall seconds of each in every round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from benchmarks.moe.contenders import BARE, CONTENDERS, NotMeasuredError, yardsticks
from benchmarks.moe.shapes import Shape, Weights, gradient, tokens
from benchmarks.turns import turn
from torch import nn

Tensor = torch.Tensor
Step = Callable[[], object]
SLOW = 6.0
"""Of a contender that takes more than so many times the bare products, one round is enough."""


def step_of(layer: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], x: Tensor, dy: Tensor) -> Step:
    """Forward, backward, and gradients are gone, as ``zero_grad`` does."""

    def step() -> None:
        layer(x).backward(dy)
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def results(layer: Callable[[Tensor], Tensor], parameters: Sequence[nn.Parameter], x: Tensor, dy: Tensor) -> Tensor:
    """(2, T, D): output and the gradient of the input."""
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    found = torch.stack([y.detach(), x.grad]).float()
    x.grad = None
    for parameter in parameters:
        parameter.grad = None
    return found


def tolerance(shape: Shape) -> float:
    """Of ‖a - b‖ / ‖b‖: roundings of a few products, which the two have in another order and other places."""
    return 16 * torch.finfo(shape.torch_dtype).eps


class Built:
    """The contenders of one shape: ``steps`` by (routing, name), and why others are ``left_out``.

    Raises:
        AssertionError: two of them do not compute the same.
    """

    def __init__(self, shape: Shape, routings: Iterable[str], names: Iterable[str]) -> None:
        weights, dy = Weights.of(shape), gradient(shape)
        self.shape = shape
        self.steps: dict[tuple[str, str], Step] = {("even", k): v for k, v in yardsticks(shape, weights).items()}
        self.left_out: dict[str, str] = {}
        inputs = {routing: tokens(shape, routing).requires_grad_() for routing in routings}
        expected: dict[str, Tensor] = {}
        for name in names:
            refused = {routing: CONTENDERS[name].refuse(shape, routing) for routing in inputs}
            self.left_out |= {f"{name}, {routing}": why for routing, why in refused.items() if why}
            try:
                if all(refused.values()):
                    continue
                layer, parameters = CONTENDERS[name].build(shape, weights)
            except NotMeasuredError as error:
                self.left_out[name] = str(error)
                continue
            for routing, x in inputs.items():
                if not refused[routing]:
                    if CONTENDERS[name].same(shape):
                        found = results(layer, parameters, x, dy)
                        self._compare(name, found, expected.setdefault(routing, found))
                    self.steps[routing, name] = step_of(layer, parameters, x, dy)

    def _compare(self, name: str, found: Tensor, expected: Tensor) -> None:
        for what, a, b in zip(("output", "gradient of the input"), found, expected, strict=True):
            error = float((a - b).norm() / b.norm())
            if not error <= tolerance(self.shape):
                raise AssertionError(f"{name}: the {what} differs by {error:.2g} of its norm, {self.shape}.")


def interleaved(steps: dict[tuple[str, str], Step], rounds: int) -> dict[tuple[str, str], dict[str, list[float]]]:
    """CPU and wall seconds; the order within a round rotates. What is very slow gets a single round.

    A part is two steps, of which the second one counts: in training a layer finds caches and free memory as the same
    model has left them, not as another implementation has.
    """
    keys = list(steps)
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {key: {"cpu": [], "wall": []} for key in keys}
    for number in range(-1, rounds):  # the first one warms up
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            if number > 0 and seconds[key]["cpu"][0] > SLOW * seconds["even", BARE]["cpu"][0]:
                continue
            with turn():
                if number >= 0:
                    steps[key]()
                began, cpu_began = time.perf_counter(), time.process_time()
                steps[key]()
                cpu, wall = time.process_time() - cpu_began, time.perf_counter() - began
            if number >= 0:
                seconds[key]["cpu"].append(cpu)
                seconds[key]["wall"].append(wall)
        gc.collect()
    return seconds


def measure(shape: Shape, routings: Sequence[str], rounds: int, threads: int, names: Sequence[str]) -> dict[str, Any]:
    """One record."""
    torch.set_num_threads(threads)
    built = Built(shape, routings, names)
    seconds = interleaved(built.steps, rounds)
    return {
        "shape": shape.record(), "threads": threads, "left_out": built.left_out,
        "seconds": [{"routing": routing, "name": name, **of} for (routing, name), of in seconds.items()],
    }  # fmt: skip
