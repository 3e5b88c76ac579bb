"""Gradients of a scaled loss that are used more than once: a step leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, data
from torch import nn

from zoo import sim
from zoo.zero import LossScaler, ZeroOptimizer, safe_get_full_grad

Run = Callable[[nn.Module, Any, list[int], Callable[[torch.Tensor], None]], None]


def _step_twice(model: nn.Module, optimizer: Any, ranks: list[int], back: Callable[[torch.Tensor], None]) -> None:
    for rank in ranks:
        back(model(data(rank)).square().mean())
    optimizer.step()
    optimizer.step()


def _go_on_adding(model: nn.Module, optimizer: Any, ranks: list[int], back: Callable[[torch.Tensor], None]) -> None:
    for step in range(3):
        for rank in ranks:
            back(model(data(rank, step)).square().mean())
        optimizer.step()


def _step_again(model: nn.Module, optimizer: Any, ranks: list[int], back: Callable[[torch.Tensor], None]) -> None:
    for rank in ranks:
        back(model(data(rank)).square().mean())
    group = optimizer.param_groups[0]
    rate, group["lr"] = group["lr"], "none"
    with pytest.raises(TypeError):
        optimizer.step()
    group["lr"] = rate
    optimizer.step()


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("run", [_step_twice, _go_on_adding, _step_again])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("pieces", [1, 10**9])
def test_gradients_are_used_again(stage: int, run: Run, dynamic: bool, pieces: int) -> None:
    def fn(rank: int) -> None:
        scaler = LossScaler(scale=1024.0, dynamic=dynamic, window=1)  # doubles with each step
        model, optimizer = build(stage, loss_scale=scaler, sub_group_size=pieces)
        run(model, optimizer, [rank], optimizer.backward)
        check(optimizer, expected)

    plain = Blocks().double()
    run(plain, torch.optim.SGD(plain.parameters(), lr=RATE), [0, 1], lambda loss: (loss / 2).backward())
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", [{"loss_scale": 1024.0}, {"clip_norm": 1e-3}])
def test_a_step_leaves_the_gradient_as_it_is_or_clipped(stage: int, options: dict[str, Any]) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, **options)
        weight: Any = model.get_parameter("first.weight")
        optimizer.backward(model(data(rank)).square().mean())
        before = safe_get_full_grad(weight)
        optimizer.step()
        after = safe_get_full_grad(weight)
        assert before is not None
        assert after is not None
        if "clip_norm" in options:  # as torch's clip_grad_norm_ before a step leaves it
            assert optimizer.grad_norm is not None
            before = before * (options["clip_norm"] / (optimizer.grad_norm + 1e-6))
        assert torch.equal(after, before)

    sim.run(2, fn)


def test_an_optimizer_with_nothing_on_this_rank_steps() -> None:
    def fn(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(1, 1, bias=False)
        optimizer = ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=RATE, loss_scale=8.0)
        optimizer.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()

    sim.run(3, fn)
