"""What a script does with a model that is one graph: it computes what the hooks do, or says why not."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.compile import compile_whole, register_compile_pass
from zoo.compile.capture import NotWholeError
from zoo.zero import Precision, ZeroOptimizer, register_external_parameter, unregister_external_parameter

WIDTH = 4


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Two(nn.Module):
    """Two layers, whose results are both returned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        return x, self.last(x)


def batch(step: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(7 * step + rank))


def made(model: nn.Module, compiles: bool, stage: int = 3, **options: Any) -> tuple[Any, Any]:
    """An optimizer, and the graph."""
    optimizer = ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.SGD, lr=0.1,
        **{"param_persistence_threshold": 0, "reduce_bucket_size": 1, "max_live_parameters": 0, **options},
    )  # fmt: skip
    return optimizer, compile_whole(optimizer.sharded, "aot_eager") if compiles else None


def step_of(model: Any, optimizer: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step))[1].square().sum()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def some_inputs(model: Any, optimizer: Any) -> None:
    """``backward(inputs=)`` of some parameters."""
    model(batch())[1].sum().backward(inputs=[model.first.weight, model.last.bias])
    optimizer.step()


def eagerly(model: Any, optimizer: Any) -> None:
    step_of(model, optimizer, 0)
    with torch.compiler.set_stance("force_eager"):
        step_of(model, optimizer, 1)
    with torch._dynamo.config.patch(disable=True):
        step_of(model, optimizer, 2)


def saved_elsewhere(model: Any, optimizer: Any) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = model(batch())[1].sum()
    optimizer.backward(loss)
    optimizer.step()


def recomputed(model: Any, optimizer: Any) -> None:
    x = batch().requires_grad_()
    optimizer.backward(checkpoint(model, x, use_reentrant=False)[1].square().sum())  # type: ignore[index]
    optimizer.step()


def traced_from_outside(model: Any, optimizer: Any) -> None:
    called = torch.compile(lambda x: model(x)[1].square().sum(), backend="aot_eager")
    optimizer.backward(called(batch()))
    optimizer.step()


def compiled_again(model: Any, optimizer: Any) -> None:
    """Between a forward and its backward."""
    loss = model(batch())[1].square().sum()
    if model._compiled_call_impl is not None:
        compile_whole(optimizer.sharded, "aot_eager")
    gc.collect()
    optimizer.backward(loss)
    optimizer.step()


SCRIPTS: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "some inputs": (some_inputs, ""), "torch is told to run eagerly": (eagerly, ""),
    "what is saved goes elsewhere": (saved_elsewhere, "hooks on what autograd saves"),
    "all of it is recomputed": (recomputed, "hooks on what autograd saves"),
    "traced from outside": (traced_from_outside, ""), "compiled again": (compiled_again, ""),
}  # fmt: skip
"""What is done, and why that is no graph."""


@pytest.mark.dear
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_computes_what_it_does_uncompiled(what: str, stage: int) -> None:
    script, why = SCRIPTS[what]

    def fn(compiles: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
        model = Two()
        optimizer, whole = made(model, compiles, stage)
        script(model, optimizer)
        return optimizer.consolidated_parameters(), list(whole.reasons.values()) if compiles else []

    (found, reasons), (right, _) = fn(True), fn(False)
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert len(reasons) == bool(why)
    assert all(why in reason for reason in reasons)


def test_a_model_that_nobody_has_any_more_is_gone() -> None:
    model = Two()
    optimizer, _ = made(model, True)
    step_of(model, optimizer, 0)
    with torch.no_grad():
        model(batch())
    left = [weakref.ref(model), weakref.ref(optimizer.sharded.runtime)]
    del model, optimizer, _
    gc.collect()
    assert [reference() for reference in left] == [None, None]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_is_an_ordinary_one(copied: Callable[[Any], Any]) -> None:
    model = Two()
    optimizer, _ = made(model, True, stage=0)
    other = copied(model)
    began = optimizer.sharded.runtime.contexts.latest
    other(batch())[1].sum().backward()
    assert other.first.weight.grad.any()
    assert optimizer.sharded.runtime.contexts.latest == began
    step_of(model, optimizer, 0)


@pytest.mark.dear
def test_what_no_graph_can_do_is_said() -> None:
    model = Two()
    optimizer, whole = made(model, True, ignore_unused_parameters=False)
    with pytest.raises(ValueError, match="got no gradient in backward: last"):
        optimizer.backward(model(batch())[0].sum())
    assert "ignore_unused_parameters=False" in whole.reasons[True, True]
    model = Two()
    optimizer, _ = made(model, True, stage=1)
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x)[1].sum(), x, create_graph=True)
    optimizer.zero_grad()
    step_of(model, optimizer, 0)


class Keeps(Two):
    """It keeps what it has computed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.kept = []
        found = super().forward(x)
        self.kept += found
        return found


class Passes(nn.Module):
    """A layer that returns what it is given, one that runs without gradients, one whose result nobody uses, and one
    that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Layer(i) for i in range(6))
        self.layers[5].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = self.layers[1](self.layers[0](x))
        with torch.no_grad():
            shift = self.layers[2](x)
        self.layers[3](x)
        return None, self.layers[5](self.layers[4](x) + shift)


class Layer(nn.Linear):
    def __init__(self, number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.number == 1 else torch.tanh(super().forward(x))


class Again(Two):
    """It computes a layer again in backward."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = checkpoint(self.apart, x.unflatten(0, (1, -1)), use_reentrant=False)  # type: ignore[assignment]
        return x, self.last(x)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x.flatten(0, 1)))


class Outside(Two):
    """It reads a parameter of a layer in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reads(self.first)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(self.reader(torch.tanh(self.first(x))))


class Reads(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.other, self.own = [other], nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.own(x) @ self.other[0].weight
        return out


class Looks(Two):
    """The gradient of a table is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x + self.table((x[:, 0] > 0).long()))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "keeps": (Keeps, {}), "passes": (Passes, {}), "all lengths": (Two, {"dynamic": True}), "outside": (Outside, {}),
    "again, all lengths": (Again, {"dynamic": True}), "sparse gradients": (Looks, {}),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", MODELS)
def test_a_graph_begins_what_the_hooks_begin(what: str, stage: int) -> None:
    def fn(rank: int, compiles: bool) -> tuple[list[Any], dict[str, torch.Tensor], Any]:
        make, options = MODELS[what]
        model = make()
        optimizer, _ = made(model, False, stage)
        whole = compile_whole(optimizer.sharded, "aot_eager", **options) if compiles else None
        starts = []
        for step in range(3):
            with optimizer.sharded.record() as actions:
                step_of(model, optimizer, step)
            # A recomputation begins within what is before it, or after that: the same is sent in the same order.
            starts.append([(a.kind, a.label, a.moment, a.collectives) for a in actions.starts()])
        return starts, optimizer.consolidated_parameters(), whole

    torch._dynamo.reset()
    ((starts, found, whole),), ((right, values, _),) = (
        sim.run(1, lambda rank, c=c: fn(rank, c)) for c in (True, False)
    )
    assert starts == right
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert whole.plans
    assert not whole.reasons


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_gets_inputs_as_they_are_at_its_place(late: bool) -> None:
    """Inputs are cast by a hook, too: after those that were there before."""

    def fn(compiles: bool) -> tuple[list[torch.Tensor], Any]:
        model = Two()
        if not late:
            model.register_forward_pre_hook(lambda module, args: (args[0] * 3.1 + 1e-3,))
        optimizer, whole = made(model, compiles, precision=Precision(param=torch.bfloat16))
        if late:
            model.register_forward_pre_hook(lambda module, args: (args[0] * 3.1 + 1e-3,))
        losses = [step_of(model, optimizer, step) for step in range(2)]
        with torch.no_grad():
            losses += model(batch(3))
        return losses, whole

    (found, whole), (right, _) = fn(True), fn(False)
    assert all(map(torch.equal, found, right))
    assert len(whole.reasons) == (0 if late else 2)
    assert all("gets its inputs before they are cast" in why for why in whole.reasons.values())


@pytest.mark.dear
def test_parameters_that_a_layer_reads_no_more_are_found_out() -> None:
    def fn(rank: int, compiles: bool) -> tuple[list[torch.Tensor], Any]:
        model = Outside()
        optimizer, whole = made(model, compiles)
        register_external_parameter(model.reader, model.first.weight)
        losses = [step_of(model, optimizer, 0)]
        unregister_external_parameter(model.reader, model.first.weight)
        return losses + [step_of(model, optimizer, step) for step in range(3)], whole

    ((found, whole),), ((right, _),) = (sim.run(1, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    assert all(map(torch.equal, found, right))
    assert len(whole.plans) == 2
    assert not whole.reasons


class Writes(Two):
    """It writes to an input, in whose memory another one is."""

    def forward(self, x: torch.Tensor, part: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if part is None:
            return super().forward(x)
        x.add_(1.0)
        return super().forward(x + part.sum())


def test_what_may_be_a_graph_later_is_tried_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise NotWholeError("not yet", again=True)

    monkeypatch.setattr("zoo.compile.whole.capture", refused)
    model = Two()
    optimizer, whole = made(model, True)
    for step in range(5):
        assert bool(whole.reasons) == (step > 3)
        step_of(model, optimizer, step)
    assert "not yet" in whole.reasons[True, True]


def test_inputs_that_torch_joins_are_no_inputs_of_a_graph() -> None:
    model = Writes()
    _, whole = made(model, True)
    with torch.no_grad():
        x = batch()
        found = model(x, x[1:])[1]
    assert "share memory" in whole.reasons[True, False]
    y = batch() + 1
    assert torch.equal(found, Two()(y + y[1:].sum())[1].detach())


class Counts(Two):
    """How much it computes depends on values."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len((x > 10).nonzero()):
            raise ValueError("too large")
        return super().forward(x)


def test_why_it_is_no_graph_says_where() -> None:
    model, right = Counts(), Counts()
    _, whole = made(model, True)
    with torch.no_grad():
        assert torch.equal(model(batch())[1], right(batch())[1])
        assert "test_calls.py:" in whole.reasons[True, False]
        with pytest.raises(ValueError, match="too large"):
            model(100 * batch())


@pytest.mark.parametrize(("trains", "gradients"), [(True, True), (True, False), (False, True), (False, False)])
def test_which_calls_are_no_graphs_is_said(trains: bool, gradients: bool, caplog: pytest.LogCaptureFixture) -> None:
    said = f"in {'training' if trains else 'evaluation'} with{'' if gradients else 'out'} gradients"
    model = Counts()
    _, whole = made(model, True)
    model.train(trains)
    with caplog.at_level("WARNING", "zoo.compile"), torch.set_grad_enabled(gradients):
        model(batch())
    assert f"Counts is no whole graph {said}, and runs as if" in caplog.text
    assert whole.report().startswith(f"no graph {said}: ")


@pytest.mark.parametrize("broken", [lambda graph, plan: None, lambda graph, plan: graph["nothing"]])
def test_a_pass_that_fails_is_named(broken: Any) -> None:
    register_compile_pass("broken_in_tests", broken)
    model = Two()
    optimizer, _ = made(model, False)
    whole = compile_whole(optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place", "broken_in_tests"])])
    step_of(model, optimizer, 0)
    assert "the pass 'broken_in_tests'" in whole.reasons[True, True]


def test_passes_that_come_later_are_tried_whatever_failed_before_them() -> None:
    def broken(graph: Any, plan: Any) -> Any:
        raise KeyError("nothing")

    register_compile_pass("broken_in_tests", broken)
    model = Two()
    optimizer, _ = made(model, False)
    schedule = [(0, ["keep", "place", "broken_in_tests"]), (1, ["keep", "place"])]
    whole = compile_whole(optimizer.sharded, "aot_eager", schedule=schedule)
    for step in range(2):
        assert not whole.plans
        step_of(model, optimizer, step)
        assert bool(whole.reasons) == (step == 0)
    assert whole.plans


@pytest.mark.dear
def test_units_that_are_compiled_later_come_in_the_place_of_the_graph() -> None:
    model, plain = nn.Sequential(Two(), nn.Identity()), nn.Sequential(Two(), nn.Identity())
    (optimizer, whole), (other, _) = made(model, True), made(plain, False)
    for step in range(2):
        if step == 1:
            optimizer.sharded.runtime.compiled.compile_units(backend="aot_eager")
            assert model._compiled_call_impl is not whole
        assert torch.equal(step_of(model, optimizer, step), step_of(plain, other, step))
    assert len(whole.plans) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_penalty_on_weights_is_counted_or_refused(overlap: bool) -> None:
    def fn(rank: int, compiles: bool) -> dict[str, torch.Tensor]:
        model = Two()
        optimizer, _ = made(model, compiles, stage=1, overlap_comm=overlap)
        loss = model(batch(rank=rank))[1].square().sum() + sum(p.square().sum() for p in model.parameters())
        refused = pytest.raises(RuntimeError, match=r"one graph of zoo\.compile")
        with refused if compiles and overlap else contextlib.nullcontext():
            optimizer.backward(loss)
        if compiles and overlap:
            optimizer.zero_grad()
        optimizer.step()
        found: dict[str, torch.Tensor] = optimizer.consolidated_parameters()
        return found

    (found,) = sim.run(1, lambda rank: fn(rank, True))
    if not overlap:
        (right,) = sim.run(1, lambda rank: fn(rank, False))
        for name in right:
            torch.testing.assert_close(found[name], right[name])
