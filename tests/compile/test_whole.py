"""Whole graphs: the bits, the communication and the memory of the hooks, whatever the model is like."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from tests.compile.models import Model, Shape, batch
from tests.profiles import examples

from zoo import sim
from zoo.compile import check, compile_pass, compile_whole, register_compile_pass
from zoo.plan import Kind
from zoo.zero import ZeroOptimizer


@dataclass(frozen=True)
class Case:
    """A run: of two ranks by default, which compute with other tokens."""

    shape: Shape = field(default_factory=Shape)
    stage: int = 3
    ranks: int = 2
    bf16: bool = False
    keeps: int = 0
    micro_batches: int = 1
    lengths: tuple[int, ...] = (6, 6)
    compiled: tuple[int, ...] | None = None
    """Ranks that compile; None: all."""
    ragged: bool = False
    """Each rank has sequences of another length."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _checked(graph: Any, plan: Any) -> Any:
    check(graph, plan)
    return graph


register_compile_pass("checked_in_tests", _checked)
SCHEDULE = ((0, ("keep", "place", "checked_in_tests")),)


def train(rank: int, case: Case, compiles: bool) -> tuple[list[Any], dict[str, Any], list[Any], Any]:
    """Steps of training, each followed by an evaluation: outputs, parameters, what began and what was whole."""
    model = Model(case.shape)
    model.to(torch.bfloat16 if case.bf16 else torch.float32)
    optimizer = ZeroOptimizer(
        model, stage=case.stage, optimizer=torch.optim.SGD, lr=0.5, param_persistence_threshold=0,
        reduce_bucket_size=1, max_live_parameters=case.keeps,
    )  # fmt: skip
    whole = None
    if compiles and (case.compiled is None or rank in case.compiled):
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=SCHEDULE)
    outputs, recorded = [], []
    for step, length in enumerate(case.lengths):
        length += 5 * rank * case.ragged
        with optimizer.sharded.record() as actions:
            for i in range(case.micro_batches):
                loss = model(batch(step * case.micro_batches + i, rank, length))["loss"]
                optimizer.backward(loss)
                outputs.append(loss.detach().clone())
        recorded.append(actions)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad(), optimizer.sharded.record() as actions:
            outputs.append(model(batch(50 + step, rank, length))["logits"].clone())
        recorded.append(actions)
        model.train()
    return outputs, optimizer.consolidated_parameters(), recorded, whole


def assert_like_hooks(case: Case) -> None:
    hooks = sim.run(case.ranks, lambda rank: train(rank, case, False))
    graphs = sim.run(case.ranks, lambda rank: train(rank, case, True))
    for (right, values, actions, _), (found, others, seen, whole) in zip(hooks, graphs, strict=True):
        assert all(map(torch.equal, right, found))
        assert all(torch.equal(values[name], others[name]) for name in values)
        assert [a.starts() for a in actions] == [a.starts() for a in seen]
        assert [max(a.whole_bytes(), default=0) for a in actions] == [max(a.whole_bytes(), default=0) for a in seen]
        if whole is not None:
            assert not whole.reasons
            assert {plan.captured.trains for plan in whole.plans} == {True, False}


CASES = {
    "stage 3": Case(), "stage 0": Case(stage=0), "stage 1": Case(stage=1), "stage 2": Case(stage=2),
    "one rank": Case(ranks=1), "tied": Case(Shape(tied=True)), "frozen": Case(Shape(frozen=True)),
    "recomputed": Case(Shape(recomputed=True)), "repeated": Case(Shape(repeated=True)), "bf16": Case(bf16=True),
    "keeps": Case(keeps=3000), "lengths": Case(lengths=(6, 9, 12)), "accumulates": Case(micro_batches=2),
    "one compiles": Case(compiled=(1,)), "ragged": Case(ragged=True, compiled=(0,), lengths=(6, 9)),
}  # fmt: skip
QUICK = {
    "one rank": Case(Shape(2, recomputed=True), ranks=1, lengths=(6,)),
    "one compiles": Case(Shape(1), compiled=(1,), lengths=(6,)),
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.parametrize("name", QUICK)
def test_a_small_graph_is_what_the_hooks_are(name: str) -> None:
    assert_like_hooks(QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_what_the_hooks_are(name: str) -> None:
    assert_like_hooks(CASES[name])


@pytest.mark.slow
@examples(times=0.2)
@given(
    shape=st.builds(Shape, blocks=st.just(2), tied=st.booleans(), frozen=st.booleans(),
                    recomputed=st.booleans(), repeated=st.booleans()),
    stage=st.sampled_from([0, 1, 2, 3, 3]), ranks=st.integers(1, 4), bf16=st.booleans(),
    keeps=st.sampled_from([0, 800, 3000, 10**6]), micro_batches=st.integers(1, 2),
    lengths=st.sampled_from([(6,), (6, 9)]), compiled=st.none() | st.just((0,)),
    ragged=st.booleans(),
)  # fmt: skip
def test_any_run_is_what_the_hooks_make_it(**options: Any) -> None:
    torch._dynamo.reset()
    assert_like_hooks(Case(**options))


def one_rank(model: Any, stage: int = 3, **options: Any) -> Any:
    return ZeroOptimizer(
        model, stage=stage, optimizer=torch.optim.SGD, lr=0.5, param_persistence_threshold=0, **options
    )


class Breaks(Model):
    """A model that no graph can be of: it asks for a value."""

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(tokens)
        if float(out["loss"].detach()) < -1.0:
            out["loss"] = out["loss"] * 2
        return out


@pytest.mark.dear
def test_a_model_that_is_no_graph_runs_by_its_hooks_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    def fn(rank: int, compiles: bool) -> Any:
        model = Breaks(Shape(blocks=1))
        optimizer = one_rank(model)
        whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
        for step in range(2):
            optimizer.backward(model(batch(step, rank))["loss"])
            optimizer.step()
        return optimizer.consolidated_parameters(), whole

    with caplog.at_level(logging.WARNING, "zoo.compile"):
        ((found, whole),) = sim.run(1, lambda rank: fn(rank, True))
    ((right, _),) = sim.run(1, lambda rank: fn(rank, False))
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert list(whole.reasons) == [(True, True)]
    assert sum("is no whole graph in training with gradients" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.dear
def test_a_model_of_one_class_after_another_is_a_graph() -> None:
    """torch counts the graphs of a code object, whatever model they are of."""
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for _ in range(4):
            model = Model(Shape(blocks=1))
            whole = compile_whole(one_rank(model).sharded, "aot_eager")
            model(batch(0, 0))
            assert len(whole.plans) == 1
            assert not whole.reasons


@pytest.mark.dear
def test_too_many_kinds_of_inputs_run_by_the_hooks(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(Shape(blocks=1))
    right = Model(Shape(blocks=1))
    whole = compile_whole(one_rank(model).sharded, "aot_eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for length in (3, 4, 5, 6, 3):
            assert torch.equal(model(batch(0, 0, length))["logits"], right(batch(0, 0, length))["logits"])
    assert len(whole.plans) == 2
    assert "made 2 graphs of it already" in whole.reasons[True, False]
    assert "dynamic=True" in caplog.text


@pytest.mark.dear
def test_hooks_on_gradients_are_called() -> None:
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model)
    whole = compile_whole(optimizer.sharded, "aot_eager")
    optimizer.backward(model(batch(0, 0))["loss"])
    assert not whole.reasons
    optimizer.step()
    seen = []
    model.blocks[0].up.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    optimizer.backward(model(batch(1, 0))["loss"])
    assert seen == [(16, 8)]
    assert "a hook waits for the gradient of 'blocks.0.up.weight'" in whole.reasons[True, True]


@pytest.mark.dear
def test_hooks_on_modules_that_came_later_are_called() -> None:
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model)
    compile_whole(optimizer.sharded, "aot_eager")
    with torch.no_grad():
        before = model(batch(0, 0))["logits"]
        handle = model.norm.register_forward_hook(lambda module, args, output: output * 0)
        assert not model(batch(0, 0))["logits"].any()
        handle.remove()
        assert torch.equal(model(batch(0, 0))["logits"], before)


ROUTES: dict[str, tuple[int, Any]] = {
    "parameters on NVMe": (2, lambda path: {"offload_param": {"device": "nvme", "nvme_path": str(path)}}),
    "parameters on the host": (2, lambda path: {"offload_param": {"device": "cpu"}}),
    "secondary partitions": (4, lambda path: {"zero_hpz_partition_size": 2}),
    "quantised weights": (2, lambda path: {"zero_quantized_weights": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", ROUTES)
def test_parameters_come_from_wherever_they_live(what: str, tmp_path: Path) -> None:
    ranks, options = ROUTES[what]

    def fn(rank: int, compiles: bool) -> Any:
        path = tmp_path / str(compiles)
        path.mkdir(exist_ok=True)
        model = Model(Shape(2, tied=True))
        optimizer = one_rank(model, reduce_bucket_size=1, **options(path))
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=SCHEDULE) if compiles else None
        losses, starts = [], []
        for step in range(2):
            with optimizer.sharded.record() as actions:
                loss = model(batch(step, rank))["loss"]
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            starts.append(actions.starts())
        assert whole is None or not whole.reasons
        return losses, starts, optimizer.consolidated_parameters()

    graphs, hooks = (sim.run(ranks, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (losses, starts, values), (right, others, parameters) in zip(graphs, hooks, strict=True):
        assert all(map(torch.equal, losses, right))
        assert starts == others
        assert all(torch.equal(values[name], parameters[name]) for name in parameters)


class Outer(Model):
    """Layers that belong to the model itself, before and after a unit."""

    def __init__(self) -> None:
        super().__init__(Shape(blocks=1))
        self.first = torch.nn.Parameter(torch.randn(8, 8))
        self.last = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (self.blocks[0](torch.tanh(x @ self.first)) @ self.last).square().sum()


@pytest.mark.dear
def test_what_the_model_itself_reads_is_here_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.shard.memory.POOLED_BYTES", 64)  # buckets are as large as those that go early

    def fn(rank: int, compiles: bool) -> Any:
        model = Outer()
        optimizer = one_rank(model, reduce_bucket_size=1)
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=SCHEDULE) if compiles else None
        for step in range(2):
            x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(2 * step + rank), requires_grad=True)
            with optimizer.sharded.record() as actions:
                optimizer.backward(model(x))
            optimizer.step()
        assert whole is None or not whole.reasons
        return actions.starts(), x.grad, optimizer.consolidated_parameters()

    graphs, hooks = (sim.run(1, lambda rank, c=c: fn(rank, c)) for c in (True, False))
    for (starts, grad, values), (right, other, parameters) in zip(graphs, hooks, strict=True):
        assert starts == right
        assert torch.equal(grad, other)
        assert all(torch.equal(values[name], parameters[name]) for name in parameters)


@pytest.mark.dear
def test_what_is_wrong_with_a_call_is_said_and_the_graph_stays() -> None:
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model)
    whole = compile_whole(optimizer.sharded, "aot_eager")
    with pytest.raises(RuntimeError, match="Long, Int"):
        model(torch.ones(2, 6))  # no tokens
    optimizer.backward(model(batch(0, 0))["loss"])
    assert not whole.reasons
    assert not optimizer.sharded.runtime.contexts.driven
    optimizer.step()


@pytest.mark.dear
def test_a_model_may_be_compiled_otherwise_afterwards() -> None:
    def fn(rank: int, how: str) -> Any:
        torch._dynamo.reset()
        model = Model(Shape(blocks=1))
        optimizer = one_rank(model, reduce_bucket_size=1)
        for step in range(2):
            if how == "twice" and step == 0:
                compile_whole(optimizer.sharded, "aot_eager")
            if how == "twice" and step == 1:
                model.compile(backend="eager")
            optimizer.backward(model(batch(step, rank))["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    (found,), (right,) = (sim.run(1, lambda rank, how=how: fn(rank, how)) for how in ("twice", "never"))
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.dear
def test_torch_is_told_nothing_when_no_model_is_traced() -> None:
    before = set(torch._dynamo.config.ignore_logger_methods), torch._dynamo.config.skip_nnmodule_hook_guards
    sim.run(2, lambda rank: train(rank, Case(Shape(1), lengths=(6,)), True))
    assert before == (set(torch._dynamo.config.ignore_logger_methods), torch._dynamo.config.skip_nnmodule_hook_guards)
    with pytest.raises(ValueError, match="CUDA graphs"):
        compile_whole(one_rank(Model(Shape(1))).sharded, mode="reduce-overhead")
    with pytest.raises(ValueError, match="aot_eager has none"):
        compile_whole(one_rank(Model(Shape(1))).sharded, "aot_eager", mode="default")


@pytest.mark.dear
def test_a_closed_optimizer_leaves_an_ordinary_model() -> None:
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model)
    compile_whole(optimizer.sharded, "aot_eager")
    loss = model(batch(0, 0))["loss"].detach()
    optimizer.close()
    assert model._compiled_call_impl is None
    assert torch.equal(model(batch(0, 0))["loss"].detach(), loss)


@pytest.mark.slow
def test_gradients_of_inputs_alone_leave_those_of_parameters() -> None:
    class Takes(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for block in self.blocks:
                x = block(x)
            return x.square().sum()

    def fn(rank: int, compiles: bool) -> Any:
        model = Takes(Shape(blocks=1))
        optimizer = one_rank(model)
        whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
        x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        (first,) = torch.autograd.grad(model(x), x)
        loss = model(x)
        optimizer.backward(loss)
        optimizer.step()
        assert whole is None or not whole.reasons
        return first, x.grad, optimizer.consolidated_parameters()

    for (a, b, c), (d, e, f) in zip(sim.run(2, lambda r: fn(r, True)), sim.run(2, lambda r: fn(r, False)), strict=True):
        assert torch.equal(a, d)
        assert torch.equal(b, e)
        assert all(torch.equal(c[name], f[name]) for name in c)


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_parameters_that_are_returned_are_refused(stage: int) -> None:
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model, stage=stage)
    compile_whole(optimizer.sharded, "aot_eager")
    loss = model(batch(0, 0))["loss"]
    with pytest.raises(RuntimeError, match=r"whole graph"):
        torch.autograd.grad(loss, [model.norm.weight])


@pytest.mark.slow
def test_two_forwards_before_their_backwards() -> None:
    def fn(rank: int, compiles: bool) -> Any:
        model = Model(Shape(blocks=1))
        optimizer = one_rank(model, max_live_parameters=2000)
        whole = compile_whole(optimizer.sharded, "aot_eager") if compiles else None
        with optimizer.sharded.record() as actions:
            first, second = (model(batch(i, rank))["loss"] for i in range(2))
            optimizer.backward(first + 2 * second)
        optimizer.step()
        assert whole is None or not whole.reasons
        return actions.starts(), optimizer.consolidated_parameters()

    for (a, b), (c, d) in zip(sim.run(2, lambda r: fn(r, True)), sim.run(2, lambda r: fn(r, False)), strict=True):
        assert a == c
        assert all(torch.equal(b[name], d[name]) for name in b)


@pytest.mark.dear
def test_passes_change_at_their_step_and_every_rank_goes_on() -> None:
    seen: list[tuple[int, bool]] = []

    def counted(graph: Any, plan: Any) -> Any:
        seen.append((len(graph.graph.nodes), plan.backward))
        return graph

    register_compile_pass("counted_in_tests", counted)
    model = Model(Shape(blocks=1))
    optimizer = one_rank(model)
    whole = compile_whole(
        optimizer.sharded, "aot_eager", schedule=[(0, ["keep", "place"]), (1, ["keep", "place", "counted_in_tests"])]
    )
    for step in range(3):
        optimizer.backward(model(batch(step, 0))["loss"])
        assert len(seen) == (2 if step else 0)  # forward and backward, once
        optimizer.step()
    told = whole.report().splitlines()
    assert [line for line in told if "calls of units" in line] == [
        "training: 10 calls of units, 16 parameters, 1 bucket(s) of 4,032 bytes that are gathered"
    ] * 2
    assert any(line.startswith("  place: backward: ") for line in told)
    assert compile_pass(counted).name == "counted_in_tests"


@pytest.mark.slow
def test_a_budget_keeps_whole_what_it_pays_for() -> None:
    def fn(rank: int, keeps: int) -> tuple[int, int]:
        model = Model(Shape(blocks=3))
        optimizer = one_rank(model, max_live_parameters=keeps, reduce_bucket_size=1)
        whole = compile_whole(optimizer.sharded, "aot_eager")
        with optimizer.sharded.record() as actions:
            optimizer.backward(model(batch(0, rank))["loss"])
        optimizer.step()
        assert not whole.reasons
        gathers = actions.of_kind(Kind.UNSHARD, Kind.PREFETCH)
        return len(gathers), max(actions.whole_bytes())

    found = [sim.run(2, lambda rank, k=keeps: fn(rank, k))[0] for keeps in (0, 1000, 2000, 10**6)]
    gathers, peaks = zip(*found, strict=True)
    assert list(gathers) == sorted(gathers, reverse=True)
    assert list(peaks) == sorted(peaks)
    buckets = gathers[-1]
    assert gathers[0] > 1.5 * buckets  # twice, but for what is used last in forward and first in backward
    assert len(set(found)) == 4
