"""``Graphs`` on the CPU, with a stand-in for the recorder that does what a CUDA graph does: it calls the functions that
were recorded, on the tensors that they had, and writes their results where they were. tests/gpu has the real one."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zoo.inference import Graphs

Tensor = torch.Tensor
CALLS: list[int] = []
CPU: dict[str, Any] = {"devices": ("cpu",)}


class Tape(TorchFunctionMode):
    """The functions of a run, with the tensors that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, out))
        return out


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    for _ in range(3):
        run()
    with Tape() as tape:
        found = run()

    def replay() -> None:
        for kernel, args, kwargs, out in tape.kernels:
            for mine, one in zip(tree_leaves(out), tree_leaves(kernel(*args, **kwargs)), strict=True):
                if isinstance(mine, Tensor) and mine.data_ptr() != one.data_ptr():
                    mine.copy_(one)

    return replay, found


class Nothing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale: Any = 1.0
        self.more = {"shift": 0.0}
        self.config = SimpleNamespace(power=1)

    def forward(self, x: Tensor, y: Tensor | None = None, *, times: float = 1.0, cache: Any = None) -> Any:
        CALLS.append(1)
        found = (self.inner(x) * times + self.shift) ** self.config.power * self.scale + self.more["shift"]
        return {"a": found if y is None else found + y, "times": times}


@pytest.fixture(autouse=True)
def _counted() -> None:
    CALLS.clear()


def kept(net: nn.Module, **options: Any) -> Graphs:
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
    ran = []

    def once(run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        found = run()
        return lambda: ran.append(1), found

    graphs = Graphs(Net(), record=once, **CPU)
    for _ in range(3):
        graphs(torch.ones(2, 4))
    assert (len(CALLS), len(ran)) == (2, 2)  # as it is, to be recorded; then twice without Python


def test_what_was_recorded_with_the_model_makes_another_kind() -> None:
    """Else a graph would go on with memory that the model has left, or with what it was told before."""
    net = Net()
    graphs, x = kept(net, most=20), torch.arange(4.0)[None] + 1
    graphs(x)
    changes: list[Callable[[], Any]] = [
        lambda: setattr(net, "inner", nn.Linear(4, 4)),
        lambda: net.inner.weight.data.__class__ and setattr(net.inner.weight, "data", torch.zeros(4, 4)),
        lambda: setattr(net, "shift", torch.zeros(4)),
        lambda: net.eval(),
        lambda: setattr(net.inner.weight, "data", net.inner.weight.data.fill_(1).tril().t()),
        lambda: setattr(net, "scale", 3.0),
        lambda: setattr(net, "scale", -0.0),
        lambda: setattr(net, "scale", torch.full((4,), 2.0)),
        lambda: net.more.update(shift=2.0),
        lambda: net.config.__dict__.update(power=2),
        lambda: setattr(net.inner, "forward", lambda x: x),
        lambda: setattr(net.inner, "__class__", Nothing),
    ]
    for number, change in enumerate(changes):
        change()
        with torch.no_grad():
            expected = net(x)["a"]
        assert torch.equal(graphs(x)["a"], expected)
        assert torch.equal(graphs(x)["a"], expected)
        assert len(graphs) == 2 + number


@pytest.mark.parametrize("given", [{"cache": object()}, {"y": torch.ones(1, 4, requires_grad=True)}])
def test_other_calls_run_as_they_are(given: dict[str, Any]) -> None:
    net = Net()
    graphs = kept(net)
    found = graphs(torch.ones(1, 4), **given)["a"]
    assert len(graphs) == 0
    assert len(CALLS) == 1
    assert not found.requires_grad


def test_what_cannot_be_recorded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(run: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = Graphs(Net(), record=fails, **CPU)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            graphs(torch.ones(1, 4))
    assert len(CALLS) == 3
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
    for most in (0, "8"):
        with pytest.raises(ValueError, match=f"most={most!r}; at least one"):
            Graphs(net, most=most)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"devices='cuda'; it must be a tuple of types, such as \('cuda',\)"):
        Graphs(net, devices="cuda")  # type: ignore[arg-type]


class Writes(nn.Module):
    """Does something else than computing."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.calls = what, 0
        self.last: Any = None
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor, more: list[Any]) -> Tensor:
        if self.what == "argument":
            return x.add_(1)
        if self.what == "list":
            more.append(1)
        if self.what == "buffer":
            return nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True)
        if self.what == "parameter":
            self.drop += 1
        if self.what == "random":
            return x * float(torch.rand(()))
        if self.what == "attribute":
            self.calls += 1
            self.last = x * self.calls
            return self.last
        return x * self.drop


@pytest.mark.parametrize(
    ("what", "told"),
    [("argument", "into its arguments"), ("list", "into its arguments"), ("buffer", "buffer norm.running_mean"),
     ("parameter", "into the model's parameters"), ("random", "draws random numbers on the host"),
     ("attribute", "changes attributes or tensors of the model each time")],
)  # fmt: skip
def test_what_a_call_does_beside_its_result_is_done_each_time(
    what: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    mine, plain = Writes(what), Writes(what)
    graphs, results = kept(mine), []
    for run in (graphs, plain):
        torch.manual_seed(0)
        x, more, found = torch.randn(3, 4), list[Any](), list[Tensor]()
        for _ in range(4):
            with torch.no_grad():
                found.append(run(x, more).clone())
        results.append([*found, x, torch.tensor(len(more))])
    assert all(map(torch.equal, *results))
    assert all(map(torch.equal, mine.state_dict().values(), plain.state_dict().values()))
    assert (mine.calls, len(graphs)) == (plain.calls, 0)
    assert caplog.text.count(told) == 1


def test_what_is_made_in_the_first_call_is_there_in_the_next() -> None:
    class Lazy(nn.Module):
        angles: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.angles is None:
                self.angles = torch.ones(4)
            return x * self.angles

    graphs, x = kept(Lazy()), torch.ones(1, 4)
    for _ in range(3):
        assert torch.equal(graphs(x), x)
    assert len(graphs) == 1


def test_hooks_are_called_each_time(caplog: pytest.LogCaptureFixture) -> None:
    net, seen = Net(), list[int]()
    graphs, x = kept(net), torch.ones(1, 4)
    expected = graphs(x)["a"]
    handle = net.inner.register_forward_hook(lambda module, given, out: seen.append(1))
    for _ in range(3):
        assert torch.equal(graphs(x)["a"], expected)
    assert (len(seen), len(graphs)) == (3, 1)
    assert caplog.text.count("has forward hooks") == 1
    handle.remove()
    before = len(CALLS)
    assert torch.equal(graphs(x)["a"], expected)
    assert len(CALLS) == before


def test_kinds_of_modes_go_together() -> None:
    """What was recorded where nothing counts versions is written to where they are counted."""
    graphs, x = kept(Net()), torch.ones(1, 4)
    with torch.inference_mode():
        expected = [graphs(x)["a"], graphs(x * 2)["a"]]
    assert torch.equal(graphs(x)["a"], expected[0])
    assert torch.equal(graphs(x * 2)["a"], expected[1])
    with Tape() as tape:  # a mode sees each function
        graphs(x)
    assert len(tape.kernels) > 2


def test_arguments_without_strides_run_as_they_are() -> None:
    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to_dense()

    graphs = kept(Dense())
    assert torch.equal(graphs(torch.eye(2).to_sparse()), torch.eye(2))
    assert len(graphs) == 0


def test_a_mistake_is_told_as_the_model_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        kept(Net())(torch.ones(1, 3))
    assert not caplog.text


def test_threads_take_turns() -> None:
    graphs = kept(Net())
    given = [torch.full((256, 4), float(i)) for i in range(4)]
    expected = [graphs(x)["a"] for x in given]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(100) if not torch.equal(graphs(given[i])["a"], expected[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
