"""What ranks load is one state: another one on some rank is refused on all, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import STAGES, Blocks, build, check, one_step, twin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from zoo import sim
from zoo.zero import ZeroOptimizer

MOMENTUM = {"momentum": 0.9}
OTHER = "loading a state_dict failed: rank 1 gave other values than rank 0, of .*Nothing was loaded"
EARLIER = "rank 1 gave a state of another moment than rank 0: after 2 updates and 1 update.*Nothing was loaded"


def refused(model: Any, optimizer: ZeroOptimizer, state: Any, match: str, rank: int, steps: int) -> None:
    """On all ranks, and training goes on as without."""
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state)
    one_step(model, optimizer, rank, steps)
    check(optimizer, twin(2, steps + 1, **MOMENTUM))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_of_an_earlier_step_on_one_rank(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, **MOMENTUM)
        one_step(model, optimizer, rank)
        earlier = optimizer.state_dict()
        one_step(model, optimizer, rank, 1)
        state = optimizer.state_dict()
        refused(model, optimizer, earlier if rank else state, EARLIER, rank, 2)
        optimizer.load_state_dict(state)
        one_step(model, optimizer, rank, 2)
        check(optimizer, twin(2, 3, **MOMENTUM))

    sim.run(2, fn)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
def test_moments_are_counted_on_from_what_was_loaded(stage: int) -> None:
    """A program that went on from step 1 has made as many updates since as the one before it."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage, **MOMENTUM)
        one_step(model, optimizer, rank)
        saved = [optimizer.state_dict()]
        one_step(model, optimizer, rank, 1)
        saved.append(optimizer.state_dict())
        model, again = build(stage, **MOMENTUM)
        again.load_state_dict(saved[1])
        one_step(model, again, rank, 2)
        state = again.state_dict()
        with pytest.raises(ValueError, match="another moment"):
            again.load_state_dict(saved[1] if rank else state)
        again.load_state_dict(state)
        one_step(model, again, rank, 3)
        check(again, twin(2, 4, **MOMENTUM))

    sim.run(2, fn)


def _double(state: dict[str, Any]) -> None:
    state["slices"] = {key: value * 2 for key, value in state["slices"].items()}


def _one_moment(state: dict[str, Any]) -> None:
    key = next(key for key in state["slices"] if key.startswith("momentum_buffer|"))
    state["slices"] = {**state["slices"], key: state["slices"][key] + 1}


def _rate(state: dict[str, Any]) -> None:
    state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]


@pytest.mark.matrix
@pytest.mark.parametrize("change", [_double, _one_moment, _rate])
@pytest.mark.parametrize("stage", STAGES)
def test_values_that_ranks_repeat(stage: int, change: Callable[[dict[str, Any]], None]) -> None:
    if stage and change is not _rate:
        pytest.skip("only one rank holds it: there is nothing to compare it with")

    def fn(rank: int) -> None:
        model, optimizer = build(stage, **MOMENTUM)
        one_step(model, optimizer, rank)
        state = optimizer.state_dict()
        if rank == 1:
            change(state)
        refused(model, optimizer, state, OTHER, rank, 1)

    sim.run(2, fn)


def test_a_number_and_a_frozen_parameter() -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(0, optimizer=torch.optim.Adam)
        one_step(model, optimizer, rank)
        state = optimizer.state_dict()
        other = copy.deepcopy(dict(state))
        other["scalars"] = {key: value + 1 for key, value in other["scalars"].items()}
        with pytest.raises(ValueError, match=r"rank 1 gave other values.*such as step/"):
            optimizer.load_state_dict(other if rank else state)

        model = Blocks()
        model.first.requires_grad_(False)
        model, optimizer = build(0, model)
        one_step(model, optimizer, rank)
        state = optimizer.state_dict()
        if rank == 1:
            state["slices"] = {k: v + 1 if "first.weight" in k else v for k, v in state["slices"].items()}
        with pytest.raises(ValueError, match=r"such as parameter of 'first\.weight'"):
            optimizer.load_state_dict(state)

    sim.run(2, fn)


@pytest.mark.parametrize("stage", STAGES)
def test_whole_states_by_parameter(stage: int) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage, **MOMENTUM)
        one_step(model, optimizer, rank)
        whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        state = copy.deepcopy(whole)
        if rank == 1:
            state["state"]["last.bias"]["momentum_buffer"] += 1
        refused(model, optimizer, state, r"rank 1 gave other values.*such as momentum_buffer of 'last\.bias'", rank, 1)

    sim.run(2, fn)
