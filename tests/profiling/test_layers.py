"""Layers that are measured one after the other, by what the profiler measures them with."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from zoo.profiling import measure_layers


class Adder:
    """No module, but it has one. Takes and gives what no pipeline sends: its own kind of dict in a tuple."""

    def __init__(self) -> None:
        self.module = nn.Linear(4, 4)

    def __call__(self, x: dict[str, Any]) -> tuple[Any, Any]:
        return {"x": self.module(x["x"]), "n": x["n"]}, object()


def test_memory_is_what_autograd_keeps_and_parameters() -> None:
    linear = nn.Linear(4, 8)
    found = measure_layers([linear, torch.tanh, nn.ReLU()], torch.ones(3, 4), what="memory", in_flight=3)
    # The input of the product; what tanh returns, which is the input of ReLU; what ReLU returns.
    assert found == [4 * (32 + 8) + 3 * 4 * 12, 3 * 4 * 24, 3 * 4 * 24]


def test_trees_are_taken_apart_and_modules_of_calls_found() -> None:
    last = lambda x: x[0]["x"] + 1  # noqa: E731
    found = measure_layers([Adder(), last], {"x": torch.ones(3, 4), "n": 5}, what="memory")
    assert found == [4 * 20 + 4 * 12, 0]
    assert len(measure_layers([Adder(), last], {"x": torch.ones(3, 4), "n": 5}, repeats=1)) == 2


def test_entries_are_built_when_their_turn_comes() -> None:
    order: list[str] = []

    def build(name: str) -> Any:
        order.append(f"build {name}")
        return lambda x: (order.append(f"call {name}"), time.sleep(0.01), x)[-1]

    found = measure_layers(["a", "b"], torch.ones(2), repeats=1, build=build)
    assert order == ["build a", "call a", "call a", "build b", "call b", "call b"]
    assert min(found) >= 0.01


def test_what_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"layer 1 failed while it was measured: .*shapes"):
        measure_layers([nn.Linear(4, 4), nn.Linear(5, 4)], torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="layer 0 failed while it was measured: no such layer"):
        measure_layers([1], torch.ones(3, 4), build=lambda one: (_ for _ in ()).throw(ValueError("no such layer")))
    with pytest.raises(ValueError, match="in_flight=0"):
        measure_layers([], torch.ones(3, 4), in_flight=0)


def test_buffers_come_back() -> None:
    norm = nn.BatchNorm1d(4)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    measure_layers([norm], torch.randn(3, 4), repeats=2)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
