"""Forwards that fail: on one rank, on all, where the model catches it, or beside an exception that is not theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, Blocks, build, check, data, one_step, twin
from torch import nn

from zoo import sim
from zoo.comm import RankFailedError
from zoo.zero import GatheredParameters, ZeroOptimizer


class Full(Exception):
    """What one rank fails with."""


def _fail(model: Any, rank: int, *, interrupt: bool = False, where: str = "blocks.1", grad: bool = True) -> None:
    kind: type[BaseException] = KeyboardInterrupt if interrupt else Full

    def raises(*_: Any) -> None:
        raise kind("on purpose")

    handle = model.get_submodule(where).register_forward_pre_hook(raises)
    try:
        with pytest.raises(kind), torch.set_grad_enabled(grad):
            model(data(rank, 7))
    finally:
        handle.remove()


def _step(model: nn.Module, optimizer: ZeroOptimizer, rank: int) -> None:
    optimizer.zero_grad()
    one_step(model, optimizer, rank)


THEN: dict[str, Callable[[Any, ZeroOptimizer, int], Any]] = {
    "forward": lambda model, optimizer, rank: model(data(rank)),
    "step": lambda model, optimizer, rank: optimizer.step(),
    "zero_grad": lambda model, optimizer, rank: optimizer.zero_grad(),
    "whole": lambda model, optimizer, rank: optimizer.consolidated_parameters(),
}


@pytest.mark.matrix
@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_that_fails_on_one_rank_is_told_on_all(interrupt: bool, then: str, grad: bool) -> None:
    if interrupt and then in ("forward", "whole"):
        pytest.skip("Python tells nobody of an interrupt: it is found when it is over for certain")

    def fn(rank: int) -> None:
        model, optimizer = build(3)
        one_step(model, optimizer, rank)
        if rank == 1:
            _fail(model, rank, interrupt=interrupt, grad=grad)
            with pytest.raises(RankFailedError, match=r"(failed alone|at different places).*latest checkpoint"):
                THEN[then](model, optimizer, rank)
        else:
            told = "RuntimeError: a forward was interrupted" if interrupt else "Full: on purpose"
            with pytest.raises(RankFailedError, match=rf"rank 1 failed with {told}") as caught:
                _step(model, optimizer, rank)
            assert caught.value.ranks == (1,)
        for _ in range(2):
            with pytest.raises(RankFailedError, match="rank 1"):
                _step(model, optimizer, rank)

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_backward_after_a_forward_that_failed_on_one_rank() -> None:
    def fn(rank: int) -> None:
        model, _ = build(3)
        loss = model(data(rank)).square().mean()
        if rank == 1:
            _fail(model, rank)
        with pytest.raises(RankFailedError, match="rank 1"):
            loss.backward() if rank == 1 else model(data(rank, 7))

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("interrupt", [False, True])
@pytest.mark.parametrize("where", ["first", "blocks.1", "last"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_forward_that_fails_on_all_ranks_leaves_no_trace(
    stage: int, interrupt: bool, where: str, grad: bool
) -> None:  # fmt: skip
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            _fail(model, rank, interrupt=interrupt, where=where, grad=grad)
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2))

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_without_gathers_fails_on_one_rank(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        if rank == 1:
            _fail(model, rank)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


class Careful(Blocks):
    """Does without a block that fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            try:
                x = x + torch.tanh(block(x))
            except Full:
                continue
        out: torch.Tensor = self.last(x)
        return out


class Silent(nn.Module):
    """Returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks()
        self.out: Any = None

    def forward(self, x: torch.Tensor) -> None:
        self.out = self.inner(x)


def test_an_exception_that_the_model_catches_is_no_failure() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3, Careful())

        def raises(*_: Any) -> None:
            raise Full("on purpose")

        model.get_submodule("blocks.1").register_forward_pre_hook(raises)
        for step in range(2):
            one_step(model, optimizer, rank, step)

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_model_that_returns_nothing_while_another_exception_is_handled() -> None:
    def fn(rank: int) -> None:
        model: Any
        model, optimizer = build(3, Silent())
        if rank == 1:
            try:
                raise Full("of the caller")
            except Full:
                model(data(rank))
        else:
            model(data(rank))
        model.out.square().mean().backward()
        optimizer.step()
        check(optimizer, {f"inner.{name}": value for name, value in twin(2).items()})

    sim.run(2, fn, group_timeout_s=5.0)


# GatheredParameters --------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_where_parameters_are_changed(stage: int, failing: int) -> None:
    """Every rank is told, nothing has changed, and all go on."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        weight: Any = model.get_parameter("first.weight")

        def change() -> None:
            with GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(3.0)
                if rank == failing:
                    raise Full("on purpose")

        with pytest.raises(Full if rank == failing else RankFailedError, match="on purpose") as caught:
            change()
        if rank != failing:
            assert f"rank {failing} failed with Full" in str(caught.value)
        numbers = torch.full((3,), float(rank + 1))
        optimizer.comm.all_reduce(numbers).wait()
        assert numbers.tolist() == [3.0] * 3
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_write_that_would_be_lost_on_one_rank() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)
        first, bias = model.get_parameter("first.weight"), model.get_parameter("first.bias")

        def change() -> None:
            with GatheredParameters(first, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    bias.fill_(3.0)

        with pytest.raises(RuntimeError, match=r"first\.bias"):
            change()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)
