"""More of what a careless user does: found by reading, each a sentence."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, check_update, data, one_step, twin
from torch import nn

from zoo import sim
from zoo.zero import GatheredParameters, PartitionedAccessError, ZeroOptimizer

# What a fresh reading found -------------------------------------------------------------------------------------------


def parameters_of(optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in optimizer.consolidated_parameters().items()}


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_assigned_count_or_are_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with optimizer.gathered():
            found = torch.autograd.grad(model(data(rank)).square().mean(), list(model.parameters()))
        try:
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
        except PartitionedAccessError as error:
            assert stage >= 2
            assert "cannot be assigned" in str(error)  # noqa: PT017
            return
        optimizer.step()
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_looking_at_the_model_in_a_hook_of_another_backward(stage: int, ranks: tuple[int, ...]) -> None:
    if stage == 3 and ranks == (0,):
        return  # all ranks run the same units there

    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        other = torch.zeros(3, requires_grad=True)
        doubled = other * 2

        def look(gradient: torch.Tensor) -> None:
            if rank in ranks:
                with torch.no_grad():
                    model(data(rank, 5))

        doubled.register_hook(look)
        doubled.sum().backward()
        before = parameters_of(optimizer)
        optimizer.step()
        after = parameters_of(optimizer)
        assert all(torch.equal(before[n], after[n]) for n in before)
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_for_an_input_while_all_is_frozen_is_no_step(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, momentum=0.9)
        one_step(model, optimizer, rank)
        for parameter in model.parameters():
            parameter.requires_grad = False
        x = data(rank, 3).requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        for parameter in model.parameters():
            parameter.requires_grad = True
        optimizer.step()
        one_step(model, optimizer, rank, 1)
        check(optimizer, twin(2, 2, momentum=0.9))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ["data", "gathered"])
def test_new_values_between_a_forward_and_its_backward_are_refused_on_all_ranks(stage: int, way: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        loss = model(data(rank)).square().mean()
        weight = model.blocks[1].weight
        if way == "data":
            weight.data = torch.ones(6, 6, dtype=torch.float64)
        else:
            with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    weight.fill_(1.0)
        with pytest.raises(RuntimeError, match="new values that were given"):
            loss.backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_optimizer_says_so(stage: int) -> None:
    def fn(rank: int) -> None:
        _, optimizer = build(stage)
        optimizer.close()
        optimizer.close()
        sharded, loss = optimizer.sharded, torch.ones((), requires_grad=True)
        for use in (
            optimizer.step, optimizer.zero_grad, optimizer.state_dict, optimizer.consolidated_parameters,
            optimizer.state_scalars, lambda: optimizer.backward(loss), lambda: optimizer.scale_loss(loss),
            optimizer.no_sync().__enter__, sharded.window, sharded.record, sharded.unshard, sharded.wait,
            sharded.reduce, sharded.sync_buffers, sharded.gathered().__enter__,
        ):  # fmt: skip
            with pytest.raises(ValueError, match="was closed"):
                use()
        assert loss.grad is None

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_torchs_gradient_scaler_cannot_do_is_said(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(data(rank)).square().mean()).backward()
        with pytest.raises(PartitionedAccessError, match=r"GradScaler give loss_scale= to the optimizer\. Use"):
            scaler.unscale_(optimizer)
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_inside_of_a_backward_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        handle = model.blocks[1].register_full_backward_hook(lambda *_: optimizer.step())
        with pytest.raises(RuntimeError, match=r"step\(\) inside of a backward"):
            model(data(rank)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_many_forwards_that_lead_to_one_loss(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        torch.stack([model(data(rank, k)).square().mean() for k in range(70)]).sum().backward()
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    for rank in range(2):
        (torch.stack([plain(data(rank, k)).square().mean() for k in range(70)]).sum() / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("retain", [True, False])
def test_one_backward_through_an_old_forward_and_a_new_one(stage: int, retain: bool) -> None:
    def run(model: nn.Module, rank: int, world: int) -> None:
        old, first = (model(data(rank, k)).square().mean() / world for k in (1, 2))
        if retain:
            old.backward(retain_graph=True)
        first.backward()
        (old + model(data(rank, 3)).square().mean() / world).backward()

    check_update(stage, run)


@pytest.mark.parametrize("stage", STAGES)
def test_a_scaled_loss_with_a_backward_inside_of_backward(stage: int) -> None:
    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
            ctx.x, ctx.module = x.detach().requires_grad_(), module
            with torch.enable_grad():
                ctx.out = module(ctx.x)
            out: torch.Tensor = ctx.out.detach()
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            torch.autograd.backward(ctx.out, grad)
            return ctx.x.grad, None

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Blocks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Inside.apply(x.requires_grad_(), self.inner)
            return out

    def fn(rank: int) -> None:
        model, optimizer = build(stage, Wrapped(), loss_scale=4.0, units=[nn.Linear])
        one_step(model, optimizer, rank)
        check(optimizer, {f"inner.{n}": v for n, v in twin(2).items()})

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pickled_model_is_an_ordinary_one(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        with optimizer.gathered():
            again = pickle.loads(pickle.dumps(model))
        assert all(type(p) is nn.Parameter for p in again.parameters())
        again(data(rank)).sum().backward()
        one_step(model, optimizer, rank)

    sim.run(2, fn)


def test_views_of_a_dict_are_outputs_too() -> None:
    class Views(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": super().forward(x)}.values()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Views(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                (x,) = block(x)
            return x

    for stage in STAGES:

        def fn(rank: int, stage: int = stage) -> None:
            model, optimizer = build(stage, Model())
            one_step(model, optimizer, rank)
            check(optimizer, twin(2, 1, Model))

        sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_zeroing_gradients_of_which_a_part_is_reduced(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        model(data(rank)).square().mean().backward()
        with optimizer.no_sync():
            model(data(rank, 1)).square().mean().backward()
        before = parameters_of(optimizer)
        model.zero_grad(set_to_none=False)
        optimizer.step()
        after = parameters_of(optimizer)
        assert all(torch.equal(before[n], after[n]) for n in before)

    sim.run(2, fn)
