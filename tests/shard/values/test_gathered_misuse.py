"""``GatheredParameters`` given what is no parameter, entered twice, and nested ones that end with an exception."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, build, check, one_step, twin

from zoo import sim
from zoo.zero import GatheredParameters

NO_PARAMETERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: model.named_parameters(), r"a pair, as named_parameters\(\) gives"),
    (lambda model: dict(model.named_parameters()), "an iterable with a str"),
    (lambda model: "first.weight", "got a str"),
    (lambda model: model, r"got a Blocks; .*model\.parameters\(\)"),
    (lambda model: model.blocks, "got a ModuleList"),
    (lambda model: [model.first.weight, None], "an iterable with a NoneType"),
    (lambda model: 3, "got a int"),
]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_no_parameter_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for give, match in NO_PARAMETERS:
            with pytest.raises(TypeError, match=match):
                GatheredParameters(give(model), modifier_rank=0)
        for modifier in ("0", True, 0.0):
            with pytest.raises(TypeError, match=r"modifier_rank=.*it takes the number of a rank"):
                GatheredParameters(list(model.parameters()), modifier_rank=modifier)  # type: ignore[arg-type]
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_one_object_is_entered_once_at_a_time(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        context = GatheredParameters(list(model.parameters()), modifier_rank=0)
        for _ in range(2):
            with context, pytest.raises(RuntimeError, match=r"is entered already.*Make another one"), context:
                pass
            assert not any(bucket.active for bucket in optimizer.buckets)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("later", [False, True])
def test_what_an_inner_context_stored_stays_after_an_exception_outside(stage: int, later: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        first = optimizer.consolidated_parameters()["first.bias"]
        bias: Any = model.last.bias
        with (
            contextlib.suppress(ArithmeticError),
            torch.no_grad(),
            GatheredParameters(list(model.parameters()), modifier_rank=0),
        ):
            model.first.bias.fill_(3.0)  # type: ignore[union-attr, operator]
            with GatheredParameters([bias], modifier_rank=0):
                bias.fill_(8.0 + rank)
            if later:
                bias.fill_(9.0)
            raise ArithmeticError
        now = optimizer.consolidated_parameters()
        assert torch.equal(now["last.bias"], torch.full_like(now["last.bias"], 8.0))
        assert torch.equal(now["first.bias"], first)
        one_step(model, optimizer, rank)

    sim.run(2, fn)
