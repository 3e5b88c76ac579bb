"""Optimizers that make a state in a later step than their first one: it is saved, and loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.zero.blocks import STAGES, build, one_step
from tests.zero.saved import collect, whole

from zoo import sim
from zoo.zero import ZeroOptimizer


class Slow(torch.optim.Optimizer):
    """SGD towards an average that begins in the third step; it counts in a number that begins in the second."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                p.sub_(group["lr"] * p.grad)
                if state["step"] >= 2:
                    state["turns"] = state.get("turns", 0) + 1
                if state["step"] >= 3:
                    if "slow" not in state:
                        state["slow"] = p.clone()
                    state["slow"].lerp_(p, 1.0 / state["turns"])
                    p.copy_(state["slow"])


def made(stage: int, **options: Any) -> tuple[Any, ZeroOptimizer]:
    return build(stage, optimizer=Slow, **options)


def train(model: Any, optimizer: ZeroOptimizer, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        one_step(model, optimizer, rank, step)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_by_rank(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = made(stage)
        train(model, optimizer, rank, 0, 5)
        state = copy.deepcopy(optimizer.state_dict())
        other, again = made(stage)
        again.load_state_dict(state)
        train(model, optimizer, rank, 5, 8)
        train(other, again, rank, 5, 8)
        for name, value in optimizer.consolidated_parameters().items():
            assert torch.equal(again.consolidated_parameters()[name], value), name

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "other"), [(0, 3), (3, 0), (2, 1), (3, 3)])
def test_by_elements_at_another_stage_and_number_of_ranks(stage: int, other: int) -> None:
    def saves(rank: int) -> Any:
        model, optimizer = made(stage, reduce_bucket_size=1)
        train(model, optimizer, rank, 0, 5)
        return collect(optimizer), optimizer.state_scalars()

    found = sim.run(2, saves)
    tensors = whole([slices for slices, _ in found])
    scalars = {key: value for _, given in found for key, value in given.items()}
    assert ("first.weight", "slow") in tensors

    def goes_on(rank: int) -> dict[str, torch.Tensor]:
        _, optimizer = made(other, reduce_bucket_size=10**6)
        optimizer.load_state(lambda n, role, start, k: tensors[n, role].view(-1)[start : start + k], scalars)
        kept = {**collected(optimizer)}
        for (name, role), value in tensors.items():
            assert torch.equal(kept[name, role].view(-1), value.view(-1)), (name, role)
        assert type(optimizer.inner.state[optimizer.updater.segments[0].tensor]["turns"]) is int
        return kept

    sim.run(3, goes_on)


def collected(optimizer: ZeroOptimizer) -> dict[tuple[str, str], torch.Tensor]:
    runs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(runs, collect(optimizer))
    return whole(runs)


def test_by_parameter_it_is_refused() -> None:
    def fn(rank: int) -> None:
        model, optimizer = made(2)
        train(model, optimizer, rank, 0, 1)
        assert optimizer.state_dict()["state"]
        train(model, optimizer, rank, 1, 3)
        with pytest.raises(NotImplementedError, match="Slow, which keeps 'slow', 'turns' since a step after its first"):
            optimizer.state_dict()["state"]

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_momentum_that_a_schedule_turns_on_is_no_late_state(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        train(model, optimizer, rank, 0, 2)
        optimizer.param_groups[0]["momentum"] = 0.9
        train(model, optimizer, rank, 2, 4)
        assert not any("late" in key for key in optimizer.state_scalars())
        assert "momentum_buffer" in optimizer.state_dict()["state"][0]

    sim.run(2, fn)
