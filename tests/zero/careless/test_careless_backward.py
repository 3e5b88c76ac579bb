"""What a careless user does around a backward: fails on one rank, interrupts, nests, goes back in odd ways."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, build, check, data, one_step, twin
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo import sim
from zoo.comm import RankFailedError
from zoo.zero import GatheredParameters, ZeroOptimizer

# Failures of one rank ------------------------------------------------------------------------------------------------


def _with_graph(model: Any, optimizer: ZeroOptimizer) -> None:
    with pytest.raises(NotImplementedError, match="create_graph"):
        model(data(0)).square().mean().backward(create_graph=True)


def _hook(model: Any, optimizer: ZeroOptimizer) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    handle = model.blocks[1].register_full_backward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(data(0)).square().mean().backward()
    handle.remove()


LONE = {
    _with_graph: "NotImplementedError: backward.create_graph=True",
    _hook: "RuntimeError: a backward ended with an exception",
}


def again(model: nn.Module, optimizer: ZeroOptimizer, rank: int) -> None:
    optimizer.zero_grad()
    one_step(model, optimizer, rank)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fail", LONE)
@pytest.mark.parametrize("then", ["zero_grad", "forward", "step"])
def test_a_backward_that_fails_on_one_rank_is_told_on_all(stage: int, fail: Callable[..., None], then: str) -> None:
    def after(model: nn.Module, optimizer: ZeroOptimizer) -> None:
        {"zero_grad": optimizer.zero_grad, "forward": lambda: model(data(0)), "step": optimizer.step}[then]()

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        one_step(model, optimizer, rank)
        if rank == 1:
            fail(model, optimizer)
            with pytest.raises(RankFailedError, match=r"(failed alone|at different places).*latest checkpoint"):
                after(model, optimizer)
        else:
            with pytest.raises(RankFailedError, match=rf"rank 1 failed with {LONE[fail]}") as caught:
                one_step(model, optimizer, rank)
            assert caught.value.ranks == (1,)
        for _ in range(2):
            with pytest.raises(RankFailedError, match="rank 1"):
                again(model, optimizer, rank)

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fail", LONE)
def test_a_backward_that_fails_on_all_ranks_leaves_no_trace(stage: int, fail: Callable[..., None]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            fail(model, optimizer)
            optimizer.zero_grad()
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2))

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_backward_without_communication_fails_on_one_rank(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        if rank == 1:
            with optimizer.no_sync():
                _hook(model, optimizer)
            optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_backward_that_failed_another_one_is_refused(stage: int) -> None:
    """Its forward came before, so nothing of ours ran between the two."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        other = model(data(rank, 1)).square().mean()
        _hook(model, optimizer)
        with pytest.raises(RuntimeError, match=r"the latest backward ended with an exception.*zero_grad"):
            other.backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


# Interrupted forwards ------------------------------------------------------------------------------------------------


def _piecewise(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(model.first(x))
    for block in model.blocks:
        x = x + torch.tanh(block(x))
    out: torch.Tensor = model.last(x)
    return out


def _interrupted(model: Any, run: Callable[[Any, torch.Tensor], torch.Tensor], where: str) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    module = model.get_submodule(where)
    handle = module.register_forward_pre_hook(interrupt)  # after the hook of the unit
    with pytest.raises(KeyboardInterrupt):
        run(model, data(0, 7))
    handle.remove()


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("where", ["first", "blocks.1"])
@pytest.mark.parametrize("first", ["piecewise", "whole"])
@pytest.mark.parametrize("second", ["piecewise", "whole"])
@pytest.mark.parametrize("pending", [False, True])
def test_an_interrupted_forward_leaves_no_trace(stage: int, where: str, first: str, second: str, pending: bool) -> None:
    runs = {"piecewise": _piecewise, "whole": lambda model, x: model(x)}

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        for step in range(2):
            if pending:  # the gradients of this one are stepped with after the interrupted one
                runs[second](model, data(rank, step)).square().mean().backward()
            _interrupted(model, runs[first], where)
            if not pending:
                runs[second](model, data(rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not any(b.active for b in optimizer.buckets)
        check(optimizer, twin(2, 2))

    sim.run(2, fn)


@pytest.mark.parametrize("first", [_piecewise, lambda model, x: model(x)])
def test_an_interrupted_forward_holds_no_memory(first: Any) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)
        _piecewise(model, data(rank))
        at_rest = [b.parameters.live for b in optimizer.buckets]
        optimizer.zero_grad()
        _interrupted(model, first, "blocks.0")
        _piecewise(model, data(rank))
        assert [b.parameters.live for b in optimizer.buckets] == at_rest
        assert not any(b.active for b in optimizer.buckets)

    sim.run(2, fn)


@pytest.mark.parametrize("first", [_piecewise, lambda model, x: model(x)])
def test_zero_grad_gives_back_what_an_interrupted_forward_holds(first: Any) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(3)
        at_rest = optimizer.memory()["parameters"]
        _interrupted(model, first, "blocks.0")
        assert optimizer.memory()["parameters"] > at_rest
        optimizer.zero_grad()
        assert optimizer.memory()["parameters"] == at_rest

    sim.run(2, fn)


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_step_after_an_interrupted_forward_gathers_no_more_than_without_it(evaluating: bool) -> None:
    """What had been gathered ahead is forgotten, also where the next pass is of a kind that nothing is known of yet."""

    def fn(rank: int, interrupted: bool) -> list[int]:
        model, optimizer = build(3, max_live_parameters=10**6, prefetch_bucket_size=10**6)
        one_step(model, optimizer, rank)
        if interrupted:
            _interrupted(model, lambda model, x: model(x), "first")
            optimizer.zero_grad()
        model.train(not evaluating)
        optimizer.comm.log.reset()
        one_step(model, optimizer, rank, 1)
        row = optimizer.comm.log.ops["all_gather"]
        found = [row.count, row.wire_bytes]
        check(optimizer, twin(2, 2))
        return found

    assert sim.run(2, lambda rank: fn(rank, True)) == sim.run(2, lambda rank: fn(rank, False))


# Odd backwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_inside_of_a_backward_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        handle = model.get_submodule("blocks.1").register_full_backward_hook(lambda *_: optimizer.zero_grad())
        with pytest.raises(RuntimeError, match=r"zero_grad\(\) inside of a backward.*afterwards"):
            model(data(rank)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self) -> Any:
        return {"scale": self.weight}


class Returns(nn.Module):
    """A module of it returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.last = Table(), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.table()["scale"]
        out: torch.Tensor = self.last(torch.tanh(self.first(x)) * weight) + weight[:2]
        return out


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("threshold", [0, 10**6])
@pytest.mark.parametrize("sync", [True, False])
def test_a_module_that_returns_its_own_parameter(stage: int, threshold: int, sync: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, Returns(), param_persistence_threshold=threshold)
        for step in range(2):
            if not sync:
                with optimizer.no_sync():
                    (model(data(rank, step)).square().mean() * 0.0).backward()
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 2, make=Returns))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_module_called_by_itself_under_reentrant_checkpointing_and_again(stage: int) -> None:
    def loss_of(model: Any, rank: int) -> torch.Tensor:
        x = torch.tanh(model.first(data(rank)))
        x = checkpoint(model.blocks[2], x, use_reentrant=True)
        out: torch.Tensor = model.last(model.blocks[2](model.blocks[1](x)))
        return out.square().mean()

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with pytest.raises(RuntimeError, match=r"re-entrant checkpointing.*use_reentrant=False"):
            loss_of(model, rank).backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


# Graphs that are kept over a step ------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("held", [False, True])
def test_a_graph_of_a_weight_that_is_kept_over_a_step_is_refused(stage: int, held: bool) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, param_persistence_threshold=10**6)
        weight = model.get_parameter("blocks.0.weight")
        kept = (weight * weight).sum()
        with GatheredParameters(list(model.parameters())) if held else contextlib.nullcontext():
            one_step(model, optimizer, rank)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()
        optimizer.zero_grad()
        with torch.no_grad():
            weight.mul_(1.0)  # a write that is one is still seen
        one_step(model, optimizer, rank, 1)
        one_step(model, optimizer, rank, 2)
        check(optimizer, twin(2, 3))

    sim.run(2, fn)


# Memory --------------------------------------------------------------------------------------------------------------


def test_gradients_of_activations_on_the_way_cost_gathers_only() -> None:
    """Calls of single modules are one forward, also if a gradient of an activation was asked for between two of them:
    no rank has to ask the others which forward a backward goes through."""

    def fn(rank: int) -> None:
        model, optimizer = build(3)
        x = data(rank).requires_grad_()
        half = model.first(x)
        (slope,) = torch.autograd.grad(half.sum(), x, retain_graph=True)
        assert slope.shape == x.shape
        model.last(torch.tanh(half)).square().mean().backward()
        optimizer.step()
        assert set(optimizer.comm.log.ops) == {"broadcast", "all_gather", "reduce_scatter"}

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("keep", [0, 100, None])
@pytest.mark.parametrize("together", [False, True])
def test_a_backward_keeps_little_for_forwards_that_wait(keep: int | None, together: bool) -> None:
    def most(rank: int, waiting: int) -> int:
        torch.manual_seed(0)
        layers: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
        plain = copy.deepcopy(layers).double()
        _, optimizer = build(3, layers, prefetch_bucket_size=0, max_live_parameters=keep)
        seen: list[int] = []

        def look(*_: Any) -> None:
            seen.append(sum(b.num_bytes for b in optimizer.buckets if b.parameters.live))

        def loss_of(model: nn.Module, r: int, number: int, world: int) -> torch.Tensor:
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + r), dtype=torch.float64)
            return model(x).square().mean() / world

        handles = [layer.register_full_backward_hook(look) for layer in layers]
        losses = [loss_of(layers, rank, number, 1) for number in range(waiting + 1)]
        if together:
            torch.stack(losses).sum().backward()
        else:
            losses.pop().backward()
        for handle in handles:
            handle.remove()
        for loss in () if together else losses:
            loss.backward()
        optimizer.step()
        for r in range(2):
            torch.stack([loss_of(plain, r, number, 2) for number in range(waiting + 1)]).sum().backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        check(optimizer, dict(plain.named_parameters()))
        return max(seen)

    for alone, beside in zip(*(sim.run(2, lambda r, n=n: most(r, n)) for n in (0, 2)), strict=True):
        assert beside <= alone + 100 * 8 * (keep is not None and keep > 0)
