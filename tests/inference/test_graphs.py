"""``Graphs`` on the CPU, with a stand-in for the recorder that does what a CUDA graph does: it runs on the tensors it
was recorded with, and writes its results where they were. tests/gpu has the real one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn

from zoo.inference import Graphs

Tensor = torch.Tensor
CPU: dict[str, Any] = {"devices": ("cpu",)}


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    found = run()
    leaves = torch.utils._pytree.tree_leaves(found)

    def replay() -> None:
        for mine, one in zip(leaves, torch.utils._pytree.tree_leaves(run()), strict=True):
            if isinstance(mine, Tensor):
                mine.copy_(one)

    return replay, found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor | None = None, *, times: float = 1.0, cache: Any = None) -> Any:
        self.calls += 1
        found = self.inner(x) * times + self.shift
        return {"a": found if y is None else found + y, "times": times}


def kept(net: Net, **options: Any) -> Graphs:
    return Graphs(net, record=record, **CPU, **options)


@examples(times=20, quick=10)
@given(calls=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from([1.0, 2.0])), min_size=1, max_size=8))
def test_any_sequence_of_calls_gives_what_the_model_gives(calls: list[tuple[int, bool, float]]) -> None:
    net = Net()
    graphs, found, expected = kept(net, most=3), [], []
    for number, (rows, second, times) in enumerate(calls):
        torch.manual_seed(number)
        x, y = torch.randn(rows, 4), torch.randn(rows, 4) if second else None
        with torch.no_grad():
            expected.append(net(x, y, times=times))
            net.inner.weight.mul_(1.1)  # weights change in place, between recordings and replays
            expected[-1] = net(x, y, times=times)
        found.append(graphs(x, y, times=times))
    for mine, one in zip(found, expected, strict=True):  # earlier results are whole after later calls
        assert torch.equal(mine["a"], one["a"])
        assert mine["times"] == one["times"]
    assert len(graphs) == min(3, len(set(calls)))


def test_a_recorded_call_does_not_run_the_model_in_python() -> None:
    net = Net()
    ran = []

    def once(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        found = run()
        return lambda: ran.append(1), found

    graphs = Graphs(net, record=once, **CPU)
    for _ in range(3):
        graphs(torch.ones(2, 4))
    assert (net.calls, len(ran)) == (1, 3)


def test_what_was_recorded_with_the_model_makes_another_kind() -> None:
    """Else a graph would go on with memory that the model has left."""
    net = Net()
    graphs, x = kept(net), torch.ones(1, 4)
    graphs(x)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(net, "inner", nn.Linear(4, 4)),
        lambda: net.inner.weight.data.__class__ and setattr(net.inner.weight, "data", torch.zeros(4, 4)),
        lambda: setattr(net, "shift", torch.zeros(4)),
        lambda: net.eval(),
    ]
    for number, change in enumerate(changes):
        change()
        with torch.no_grad():
            expected = net(x)["a"]
        assert torch.equal(graphs(x)["a"], expected)
        assert len(graphs) == 2 + number


@pytest.mark.parametrize("given", [{"cache": object()}, {"y": torch.ones(1, 4, requires_grad=True)}])
def test_other_calls_run_as_they_are(given: dict[str, Any]) -> None:
    net = Net()
    graphs = kept(net)
    found = graphs(torch.ones(1, 4), **given)["a"]
    assert len(graphs) == 0
    assert net.calls == 1
    assert not found.requires_grad


def test_what_cannot_be_recorded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    net = Net()
    graphs = Graphs(net, record=fails, **CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graphs(torch.ones(1, 4))
    assert net.calls == 3
    assert [r.message for r in caplog.records] == [
        "a forward of Net is not recorded as a CUDA graph and runs kernel by kernel: operation not permitted when "
        "stream is capturing"
    ]


def test_results_that_are_objects_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x, [object()]

    graphs = Graphs(Filled(), record=record, **CPU)
    with caplog.at_level(logging.WARNING):
        first, second = graphs(torch.ones(1))[1][0], graphs(torch.ones(1))[1][0]
    assert first is not second
    assert len(graphs) == 0
    assert "gives a object, and only tensors, numbers and words come out" in caplog.text


def test_a_copy_records_for_itself() -> None:
    net = Net()
    graphs = kept(net)
    graphs(torch.ones(1, 4))
    other = copy.deepcopy(graphs)
    assert (len(graphs), len(other)) == (1, 0)
    with torch.no_grad():
        other.model.inner.weight.zero_()
    assert not torch.equal(graphs(torch.ones(1, 4))["a"], other(torch.ones(1, 4))["a"])
    graphs.clear()
    assert len(graphs) == 0
    with pytest.raises(ValueError, match="most=0; at least one"):
        Graphs(net, most=0)
