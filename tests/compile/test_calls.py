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
from zoo.zero import ZeroOptimizer

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
    began = optimizer.sharded.runtime.contexts._serial
    other(batch())[1].sum().backward()
    assert other.first.weight.grad.any()
    assert optimizer.sharded.runtime.contexts._serial == began
    step_of(model, optimizer, 0)


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


@pytest.mark.parametrize("broken", [lambda graph, plan: None, lambda graph, plan: graph["nothing"]])
def test_a_pass_that_fails_is_named(broken: Any) -> None:
    register_compile_pass("broken_in_tests", broken)
    model = Two()
    optimizer, _ = made(model, False)
    whole = compile_whole(optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place", "broken_in_tests"])])
    step_of(model, optimizer, 0)
    assert "the pass 'broken_in_tests'" in whole.reasons[True, True]


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
