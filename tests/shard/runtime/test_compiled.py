"""Compiled modules under ZeRO: one graph for equal modules, whenever they are compiled, and the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from zoo import sim
from zoo.engine import initialize
from zoo.shard.guard import CompiledParameter
from zoo.zero import ZeroOptimizer

BLOCKS = 12  # more than the graphs that torch.compile makes of one function before it gives up


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Stack(nn.Module):
    """Twelve of them; the first input requires a gradient, so that all are of one kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Counted:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def compile_blocks(model: Any, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def train(stage: int, when: str, rank: int, backend: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    model: Any = Stack()
    if when == "before":
        compile_blocks(model, backend)
    options: Any = {"param_persistence_threshold": 0, "reduce_bucket_size": 1, "max_live_parameters": 0}
    optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, **options)
    losses = []
    for step in range(3):
        if (when, step) in (("after", 0), ("between", 1)):
            compile_blocks(model, backend)
        losses.append(one_step(model, optimizer, rank, step))
    return losses, optimizer.consolidated_parameters(), (model, optimizer)


def one_step(called: Any, optimizer: ZeroOptimizer, rank: int, step: int) -> float:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = called(x).square().mean()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("when", "stage"),
    [  # stages 1 and 2 differ from 0 after backward alone
        pytest.param(when, stage, marks=pytest.mark.slow if stage in (1, 2) and when != "between" else [])
        for when in ("before", "after", "between") for stage in range(4)
    ],
)  # fmt: skip
def test_equal_blocks_make_one_graph_and_train_with_the_same_bits(stage: int, when: str) -> None:
    # One rank: simulated ranks share what the compiler remembers.
    counted = Counted()
    torch._dynamo.utils.counters.clear()
    (found, state, kept), *_ = sim.run(1, lambda rank: train(stage, when, rank, counted))
    assert counted.graphs == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    model = kept[0]
    compiled = [p for block in model.blocks for p in block.parameters()]
    with kept[1].gathered():  # what is not here has the class that refuses
        assert {type(p) for p in compiled} == {CompiledParameter}
    assert len({p._zoo_bucket for p in compiled}) >= BLOCKS
    assert type(model.first.weight) is not CompiledParameter
    (right, other, _), *_ = sim.run(1, lambda rank: train(stage, "never", rank, counted))
    assert found == right
    assert all(torch.equal(state[name], other[name]) for name in other)


def test_blocks_are_compiled_while_there_are_gradients() -> None:
    model: Any = Stack()
    optimizer = ZeroOptimizer(model, stage=3, lr=0.1, param_persistence_threshold=0)
    optimizer.backward(model(torch.ones(2, 4)).sum())
    compile_blocks(model, "eager")  # torch looks at the gradients of what it traces
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_compute_what_they_do_uncompiled(stage: int) -> None:
    compiled = sim.run(2, lambda rank: train(stage, "after", rank, "eager")[:2])
    plain = sim.run(2, lambda rank: train(stage, "never", rank, "eager")[:2])
    for (found, state), (right, other) in zip(compiled, plain, strict=True):
        assert found == right
        assert all(torch.equal(state[name], other[name]) for name in other)


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(), "add": lambda p: p + 1, "numpy": lambda p: p.detach().numpy().sum(),
    "item": lambda p: p[0, 0].item(),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("touch", TOUCHES)
def test_parameters_of_compiled_blocks_are_refused_where_they_are_not_there(touch: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = train(3, "before", rank, "eager")[2]
        weight = model.blocks[3].up.weight
        assert (weight.shape, weight.dtype, weight.requires_grad) == ((8, 4), torch.float32, True)
        with pytest.raises((RuntimeError, ValueError), match=r"blocks\.3"):
            TOUCHES[touch](weight)
        with optimizer.gathered():
            TOUCHES[touch](weight)
        assert weight.grad is None
        optimizer.close()
        assert type(weight) is nn.Parameter
        TOUCHES[touch](weight)

    sim.run(2, fn)


READS: dict[str, Callable[[Any], Any]] = {
    "repr": repr, "transpose": lambda p: p.T.shape, "index": lambda p: p[0].shape, "pinned": lambda p: p.is_pinned(),
    "address": lambda p: p.data_ptr() * 0, "bytes": lambda p: p.untyped_storage().nbytes(),
}  # fmt: skip


def test_parameters_of_compiled_blocks_are_described_where_they_are_not_there_as_those_of_others_are() -> None:
    def fn(rank: int, when: str) -> list[Any]:
        model, _ = train(3, when, rank, "eager")[2]
        return [read(model.blocks[3].up.weight) for read in READS.values()]

    assert sim.run(1, lambda rank: fn(rank, "before")) == sim.run(1, lambda rank: fn(rank, "never"))


class Reads(Stack):
    """Its forward uses parameters of units that it does not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x @ self.first.weight + nn.functional.linear(x, self.blocks[1].up.weight).sum()


@pytest.mark.matrix
@pytest.mark.parametrize(
    "what", ["blocks", "units", pytest.param("whole", marks=pytest.mark.slow), "a unit that is read"]
)
def test_other_units_parameters_are_used_in_a_forward_of_compiled_modules(what: str) -> None:
    def fn(rank: int, what: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = Reads()
        options: Any = {"param_persistence_threshold": 0, "reduce_bucket_size": 1, "max_live_parameters": 0}
        optimizer = ZeroOptimizer(model, stage=3, optimizer=torch.optim.SGD, lr=0.01, **options)
        if what == "blocks":
            compile_blocks(model, "eager")
        elif what == "units":
            optimizer.sharded.runtime.compiled.compile_units(backend="eager")
        elif what == "whole":
            model.compile(backend="eager")
        elif what == "a unit that is read":
            model.first.compile(backend="eager")
        losses = [one_step(model, optimizer, rank, step) for step in range(2)]
        return losses, optimizer.consolidated_parameters()

    ((found, state),) = sim.run(1, lambda rank: fn(rank, what))
    ((right, other),) = sim.run(1, lambda rank: fn(rank, "nothing"))
    assert found == right
    assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "backend"),
    [
        (2, "eager"), (3, "eager"), (0, "aot_eager"),
        *(pytest.param(stage, "aot_eager", marks=pytest.mark.slow) for stage in (1, 2, 3)),
    ],
)  # fmt: skip
def test_a_graph_is_made_while_there_are_gradients(stage: int, backend: str) -> None:
    """Of a validation between a step and the next zero_grad(), and of the second micro-batch of a step."""

    def fn(rank: int, compiles: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model: Any = Stack()
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        if compiles:
            compile_blocks(model, backend)
        optimizer.backward(model(torch.ones(3, 4)).sum())
        optimizer.step()
        with torch.no_grad():
            said = [model.eval()(torch.ones(5, 4))]
        assert model.blocks[2].up.weight.grad is not None
        return said, optimizer.consolidated_parameters()

    ((found, state),), ((right, other),) = (sim.run(1, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    assert all(map(torch.equal, found, right))
    assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.dear
def test_a_model_with_reduced_gradients_is_exported() -> None:
    def fn(rank: int) -> None:
        model = Stack()
        optimizer = ZeroOptimizer(model, stage=2, lr=0.1)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        exported: Any = torch.export.export(model, (torch.ones(2, 4),)).module()
        assert torch.equal(exported(torch.ones(2, 4)), model(torch.ones(2, 4)))

    sim.run(1, fn)


def test_gradients_are_where_they_are_without_a_compiler() -> None:
    def fn(rank: int) -> None:
        model: Any = Stack()
        optimizer = ZeroOptimizer(model, stage=2, lr=0.1, reduce_bucket_size=1)
        compile_blocks(model, "eager")
        optimizer.backward(model(torch.ones(2, 4)).sum())
        weight = model.blocks[5].up.weight
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        weight.grad = None
        optimizer.step()
        with pytest.raises(ValueError, match=r"torch\.utils\.swap_tensors was given 'blocks\.5\.up\.weight'"):
            torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(8, 4)))  # type: ignore[no-untyped-call]

    sim.run(1, fn)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("how", ["module", "function"])
def test_a_whole_model_is_compiled_after_construction(stage: int, how: str) -> None:
    def fn(rank: int, compiles: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch._dynamo.reset()
        model: Any = Stack()
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, param_persistence_threshold=0, reduce_bucket_size=1)
        called = model
        if compiles and how == "module":
            model.compile(backend="eager")
        elif compiles:
            called = torch.compile(model, backend="eager")
        losses = [one_step(called, optimizer, rank, step) for step in range(3)]
        return losses, optimizer.consolidated_parameters()

    compiled, plain = (sim.run(2, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (found, state), (right, other) in zip(compiled, plain, strict=True):
        assert found == right
        assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_compiles_unit_by_unit(stage: int) -> None:
    def fn(rank: int, backend: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        document = {
            "train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine, *_ = initialize(document, Stack())
        losses = []
        for step in range(3):
            if step == 1 and backend is not None:
                engine.compile(backend)
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return losses, engine.optimizer.consolidated_parameters()

    counted = Counted()
    torch._dynamo.utils.counters.clear()
    ((found, state),) = sim.run(1, lambda rank: fn(rank, counted))
    assert counted.graphs == 1  # of the blocks; the first layer has nothing to be joined with
    assert not torch._dynamo.utils.counters["graph_break"]
    ((right, other),) = sim.run(1, lambda rank: fn(rank, None))
    assert all(map(torch.equal, found, right))
    assert all(torch.equal(state[name], other[name]) for name in other)


@pytest.mark.parametrize("stage", [0, 3])
def test_optimizers_that_get_whole_tensors_know_parameters_of_compiled_blocks(stage: int) -> None:
    model: Any = Stack()
    compile_blocks(model, "eager")
    optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.Adafactor, lr=0.1)  # one process: not split
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    assert optimizer.state[model.blocks[2].up.weight].keys()
    with pytest.raises(ValueError, match=r"already|taken|optimizer"):
        ZeroOptimizer(model, stage=stage, lr=0.1)
    optimizer.close()
    ZeroOptimizer(model, stage=stage, lr=0.1).close()
