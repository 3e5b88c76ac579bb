"""A model that calls another one of zoo's in its forward: the hooks carry it, and the other one is what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.compile.test_calls import Two, batch, made, step_of
from tests.compile.test_engine import document
from torch import nn

from zoo.compile import compile_whole
from zoo.engine import initialize


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Student(Two):
    """It learns what another model says, and trains that one as well if it is to."""

    def __init__(self, teacher: Any, trains: bool) -> None:
        super().__init__()
        self.teacher, self.trains = [teacher], trains

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.set_grad_enabled(self.trains):
            said = self.teacher[0](x)[1]
        kept, out = super().forward(x)
        return kept, out - said


def as_graph(stage: int) -> Any:
    model = Two()
    made(model, True, stage)
    return model


def by_hooks(stage: int) -> Any:
    model = Two()
    made(model, False, stage)
    return model


def by_units(stage: int) -> Any:
    model = nn.Sequential(Two(), nn.Identity())
    optimizer, _ = made(model, False, stage)
    optimizer.sharded.runtime.compiled.compile_units(backend="aot_eager")
    return model


def as_engine(stage: int) -> Any:
    return initialize(document(stage), Two())[0]


def as_engine_with_graph(stage: int) -> Any:
    engine = as_engine(stage)
    engine.compile("aot_eager", whole=True)
    return engine


TEACHERS: tuple[Callable[[int], Any], ...] = (as_graph, by_hooks, by_units, as_engine, as_engine_with_graph)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("trains", [False, True])
def test_a_teacher_is_called_by_a_student_that_is_compiled(
    teacher: Callable[[int], Any], trains: bool, stage: int
) -> None:
    def losses(compiles: bool) -> tuple[list[torch.Tensor], Any, Any]:
        torch._dynamo.reset()
        other = (teacher if compiles else by_hooks)(stage)
        student = Student(other, trains)
        optimizer, whole = made(student, compiles, 3 - stage)
        return [step_of(student, optimizer, step) for step in range(3)], whole, other

    (found, whole, other), (right, _, _) = losses(True), losses(False)
    assert all(map(torch.equal, found, right))
    ((mode, why),) = whole.reasons.items()
    assert mode == (True, True)
    assert why.startswith("it calls another model of zoo's")
    assert "test_teacher.py:" in why
    if teacher in (as_graph, as_engine_with_graph):
        inner = getattr(other, "module", other)._compiled_call_impl
        assert inner.plans
        assert not inner.reasons


def test_a_student_that_must_be_a_graph_says_what_is_in_its_way() -> None:
    student = Student(as_graph(3), trains=False)
    optimizer, _ = made(student, False, 3)
    compile_whole(optimizer.sharded, "aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"it calls another model of zoo's.*fullgraph=True"):
        student(batch())
