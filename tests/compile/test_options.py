"""What compile_whole and an engine are told: options that there are, graphs that must be, schedules that go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.models import Model, Shape, batch
from tests.compile.test_engine import GRAPH, Loss, document

from zoo import sim
from zoo.compile import compile_whole, register_compile_pass
from zoo.compile.capture import NotWholeError
from zoo.compile.passes.pin import PINS
from zoo.engine import initialize
from zoo.zero import ZeroOptimizer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def optimizer_of(model: Any) -> Any:
    return ZeroOptimizer(model, stage=0, lr=0.1, optimizer=torch.optim.SGD)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"options": {"no_such": 1}}, "inductor has no option 'no_such'"),
    "misspelt": ({"options": {"max-autotun": True}}, "no option 'max-autotun'; 'max_autotune' is one"),
    "a word for a truth": ({"options": {"max_autotune": "yes"}}, "max_autotune of inductor is a bool, and not 'yes'"),
    "a number for a truth": ({"options": {"decompose_mem_bound_mm": 3}}, "is a bool, and not 3"),
    "of several kinds": ({"options": {"max_autotune_gemm_search_space": "HUGE"}}, "and not 'HUGE'"),
    "no options": ({"options": ["max_autotune"]}, "options= is a dict of inductor's options"),
    "unknown mode": ({"mode": "fast"}, "mode='fast'; there are default, "),
    "dynamic": ({"dynamic": "yes"}, "dynamic= is True or False, and not 'yes'"),
    "fullgraph": ({"fullgraph": "yes"}, "fullgraph= is True or False, and not 'yes'"),
    **{
        name: ({"options": {name: True}}, rf"the option {name} of inductor is False in a whole graph: ")
        for name in PINS
    },
    "by another name": ({"options": {"reorder-for-locality": True}}, "reorder_for_locality of inductor is False"),
    "partitioner": ({"options": {"custom_partitioner_fn": None}}, "custom_partitioner_fn of inductor is zoo's own"),
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("what", REFUSED)
def test_an_option_that_is_none_is_refused(what: str) -> None:
    options, said = REFUSED[what]
    model = Model(Shape(1))
    with pytest.raises(ValueError, match=said):
        compile_whole(optimizer_of(model).sharded, **options)
    assert model._compiled_call_impl is None


def test_what_is_no_split_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"compile_whole\(\) of a Model: give optimizer.sharded"):
        compile_whole(Model(Shape(1)))  # type: ignore[arg-type]


def test_options_of_inductor_are_used_and_what_is_so_anyhow_may_be_said() -> None:
    options = {**PINS, "max-autotune": False, "fallback_random": True}
    whole = compile_whole(optimizer_of(Model(Shape(1))).sharded, options=options, mode="default")
    assert whole._settings == {**PINS, "max_autotune": False, "fallback_random": True}


def test_an_engine_refuses_what_its_document_says_wrongly() -> None:
    graph = {"enabled": True, "deepcompile": True, "kwargs": {"options": {"no_such": 1}}}
    with pytest.raises(ValueError, match="inductor has no option 'no_such'"):
        initialize(document(0, compile=graph), Loss(Shape(1)))


class Asks(Loss):
    """It needs a value on the host."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        loss = super().forward(tokens)
        return loss * 2 if float(loss.detach()) < -1.0 else loss


@pytest.mark.dear
def test_a_graph_that_must_be_is_one_or_the_call_raises() -> None:
    engine, *_ = initialize(document(0), Asks(Shape(1)))
    engine.compile("aot_eager", whole=True, fullgraph=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Asks is no whole graph in training with gradients: .*fullgraph=True"):
            engine(batch(0, 0))
    engine.compile("aot_eager", whole=True, fullgraph=False)
    engine.backward(engine(batch(0, 0)))
    engine.step()

    model = Model(Shape(1))
    optimizer = optimizer_of(model)
    whole = compile_whole(optimizer.sharded, "aot_eager", fullgraph=True)
    optimizer.backward(model(batch(0, 0))["loss"])
    assert len(whole.plans) == 1
    model.norm.weight.register_hook(lambda gradient: None)
    with pytest.raises(RuntimeError, match=r"a hook waits for the gradient of 'norm.weight'.*fullgraph=True"):
        model(batch(0, 0))


@pytest.mark.dear
@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_that_must_be_and_is_none_on_one_rank_is_told_on_all(stage: int) -> None:
    def job(rank: int) -> None:
        model = Model(Shape(1))
        optimizer = ZeroOptimizer(model, stage=stage, lr=0.1, optimizer=torch.optim.SGD)
        whole = compile_whole(optimizer.sharded, "aot_eager", fullgraph=True)
        optimizer.backward(model(batch(0, 0))["loss"])
        optimizer.step()
        handle = model.norm.weight.register_hook(lambda gradient: None) if rank else None
        said = r"a hook waits for the gradient of 'norm.weight'.*fullgraph=True"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said if rank else f"rank 1: RuntimeError: Model is no .*{said}"):
                model(batch(0, 0))
        if handle is not None:
            handle.remove()
        optimizer.zero_grad()
        optimizer.backward(model(batch(0, 0))["loss"])
        optimizer.step()
        assert len(whole.plans) <= 2
        if rank and not stage:  # nothing of it is communicated
            with torch.no_grad():
                model(batch(0, 0))

    sim.run(2, job)


@pytest.mark.dear
def test_a_graph_that_must_be_may_come_after_the_hooks_have_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise NotWholeError("not yet", again=True)

    monkeypatch.setattr("zoo.compile.whole.capture", refused)
    model = Model(Shape(1))
    compile_whole(optimizer_of(model).sharded, "aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            model(batch(0, 0))
        with pytest.raises(RuntimeError, match="not yet"):
            model(batch(0, 0))


def _nothing(graph: Any, plan: Any) -> Any:
    return graph


SCHEDULE = [[0, ["keep", "place"]], [2, ["keep", "place", "later_in_tests"]]]


def names(whole: Any) -> list[str]:
    return [one.name for one in whole._passes]


@pytest.mark.dear
def test_a_schedule_goes_on_where_the_engine_does(tmp_path: Path) -> None:
    register_compile_pass("later_in_tests", _nothing)
    config = document(1, compile={**GRAPH, "schedule": SCHEDULE}, fp16={"enabled": True, "initial_scale_power": 32})

    def step(engine: Any) -> list[str]:
        engine.backward(engine(batch(0, 0)))
        engine.step()
        return names(engine.module._compiled_call_impl)

    engine, *_ = initialize(config, Loss(Shape(1)))
    engine.save_checkpoint(str(tmp_path), tag="begin")
    while not engine.global_steps - engine.skipped_steps:  # scales that are too large make no update
        assert step(engine) == ["keep", "place"]
    assert engine.skipped_steps
    assert step(engine) == ["keep", "place"]
    engine.save_checkpoint(str(tmp_path), tag="two")
    assert step(engine)[2:] == ["later_in_tests"]

    other, *_ = initialize(config, Loss(Shape(1)))
    other.load_checkpoint(str(tmp_path), tag="begin")  # no update
    other.load_checkpoint(str(tmp_path), tag="begin")
    assert step(other) == ["keep", "place"]
    other.load_checkpoint(str(tmp_path), tag="two")
    assert step(other)[2:] == ["later_in_tests"]
    other.load_checkpoint(str(tmp_path), tag="begin")
    assert step(other) == ["keep", "place"]


@pytest.mark.dear
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_schedule_goes_by_the_updates_of_an_optimizer(in_backward: bool) -> None:
    register_compile_pass("later_in_tests", _nothing)
    state: Any = None
    for loads in (False, True):
        model = Model(Shape(1))
        optimizer = ZeroOptimizer(
            model, stage=1, lr=0.1, optimizer=torch.optim.SGD, update_in_backward=in_backward, reduce_bucket_size=1
        )
        whole = compile_whole(optimizer.sharded, "aot_eager", schedule=SCHEDULE)
        if loads:
            optimizer.load_state_dict(state)
        found = []
        for step in range(3):
            optimizer.backward(model(batch(step, 0))["loss"])
            found.append(len(names(whole)))
            optimizer.step()
            optimizer.zero_grad()
            state = optimizer.state_dict() if step == 1 and not loads else state
        assert found == ([3, 3, 3] if loads else [2, 2, 3])
