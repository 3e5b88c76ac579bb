"""Parameters that come later to an optimizer whose variance is frozen: counted right, or refused, or told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from zoo.optim import OnebitAdam, ZeroOneAdam
from zoo.optim.sync_policy import ZeroOneSchedule

LATE = 6
ZERO_ONE: dict[str, Any] = {"var_freeze_step": 9, "var_update_scaler": 2, "local_step_clipper": 1}


def pair() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]


def train(optimizer: Any, params: list[torch.nn.Parameter], t: int) -> torch.Tensor:
    """What the second parameter moves in step ``t``; it has gradients of 1 from step :data:`LATE` on."""
    before = params[1].detach().clone()
    params[0].grad, params[1].grad = torch.ones(4), torch.ones(4) if t >= LATE else None
    optimizer.step()
    return before - params[1].detach()


@pytest.mark.parametrize("added", [False, True])
def test_the_variance_of_a_late_parameter_counts_its_own_updates(added: bool) -> None:
    """With a gradient of 1 in all steps every step of Adam is one of the learning rate."""
    params = pair()
    optimizer = OnebitAdam(params[: 1 if added else 2], lr=0.1, betas=(0.9, 0.99), freeze_step=9)
    for t in range(1, 13):
        if added and t == LATE:
            optimizer.add_param_group({"params": [params[1]]})
        torch.testing.assert_close(train(optimizer, params, t), torch.full((4,), 0.1 * (t >= LATE)))


def test_updates_of_a_variance_that_come_rarely_are_counted_as_they_came() -> None:
    params = pair()
    optimizer = ZeroOneAdam(params, lr=0.1, betas=(0.9, 0.99), **ZERO_ONE)
    schedule = ZeroOneSchedule(local_step_scaler=32_678, **ZERO_ONE)
    for t in range(1, 13):
        moved, state = train(optimizer, params, t), optimizer.state.get(params[1], {})
        updates = sum(schedule.at(s).variance for s in range(LATE, t + 1))
        if updates:
            m = state["exp_avg"] / (1 - 0.9 ** (t - LATE + 1))
            want = 0.1 * m / ((state["exp_avg_sq"] / (1 - 0.99**updates)).sqrt() + 1e-8)
            torch.testing.assert_close(moved, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam])
def test_who_comes_after_the_variance_was_frozen_is_refused(kind: Any) -> None:
    params = pair()
    optimizer = kind(params[:1], **({"freeze_step": 2} if kind is OnebitAdam else {"var_freeze_step": 2}))
    for t in range(1, 4):
        train(optimizer, params, t)
    with pytest.raises(ValueError, match=r"add_param_group\(\) of .* after 3 steps: the variance is frozen"):
        optimizer.add_param_group({"params": [params[1]]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", [OnebitAdam, ZeroOneAdam])
def test_elements_without_a_variance_are_told_when_it_is_frozen(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([param], **({"freeze_step": 2} if kind is OnebitAdam else {"var_freeze_step": 2}))
    with caplog.at_level(logging.WARNING, logger="zoo.optim"):
        for _ in range(4):
            param.grad = torch.tensor([1.0, 0.0, 1.0, 0.0])
            optimizer.step()
    assert [r.getMessage()[:32] for r in caplog.records] == ["2 of 4 elements had no gradient "]
