"""Parameters and gradients that one rank writes: everybody has them afterwards, or everybody is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.test_ranks_alike import DIFFERS, RATE, WORLD, backward, batch, net, start

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import GatheredParameters

BF16 = {"bf16": {"enabled": True, "auto_cast": True}}


def value(*, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(3)).to(dtype)


def copied(parameter: Any) -> None:
    with torch.no_grad():
        parameter.copy_(value())


def given_data(parameter: Any) -> None:
    parameter.data = value(dtype=parameter.dtype)


def unseen(parameter: Any) -> None:
    """As a collective does that another library starts: autograd counts nothing."""
    bits = torch.int16 if parameter.dtype is torch.bfloat16 else torch.int32
    parameter.detach().view(bits).numpy()[...] = value(dtype=parameter.dtype).view(bits).numpy()


def expected(steps: list[str]) -> torch.Tensor:
    """Plain torch in one process: "write" or "step"."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    number = 0
    for what in steps:
        if what == "write":
            with torch.no_grad():
                model[0].weight.copy_(value())
            continue
        for rank in range(WORLD):
            (model(batch(rank, number)).square().mean() / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
    return model[0].weight.detach()


@settings(max_examples=8, deadline=None)
@given(
    stage=st.integers(0, 3), writer=st.integers(0, WORLD - 1),
    steps=st.lists(st.sampled_from(["write", "step"]), max_size=4),
    write=st.sampled_from([copied, given_data, unseen]), every=st.booleans(), all_write=st.booleans(),
)  # fmt: skip
def test_what_the_modifier_rank_writes_everybody_has(
    stage: int, writer: int, steps: list[str], write: Callable[[Any], None], every: bool, all_write: bool
) -> None:
    def job(rank: int) -> torch.Tensor:
        engine = start(stage)
        weight, number = engine.module[0].weight, 0
        for what in [*steps, "step"]:
            if what == "step":
                backward(engine, rank, number)
                engine.step()
                number += 1
                continue
            names = list(engine.module.parameters()) if every else weight
            with GatheredParameters(names, modifier_rank=writer):
                if rank == writer:
                    write(weight)
                elif all_write:  # what others write does not count
                    with torch.no_grad():
                        weight.fill_(float(rank))
        return engine.module_state_dict()["0.weight"]

    for found in sim.run(WORLD, job):
        torch.testing.assert_close(found, expected([*steps, "step"]), rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("precision", [{}, BF16])
def test_what_one_rank_writes_and_sends_by_a_collective_is_taken(stage: int, precision: dict[str, Any]) -> None:
    def job(rank: int) -> torch.Tensor:
        engine = start(stage, **precision)
        copied(engine.module[0].weight) if rank == 0 else unseen(engine.module[0].weight)
        backward(engine, rank, 0)
        engine.step()
        backward(engine, rank, 1)
        engine.step()
        return engine.optimizer.consolidated_parameters()["0.weight"].float()

    tolerance = {"rtol": 2e-2, "atol": 2e-2} if precision else {"rtol": 1e-5, "atol": 1e-6}  # 8 bits of bf16
    found = sim.run(WORLD, job)
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0], expected(["write", "step", "step"]), **tolerance)


def _clips(engine: Any, rank: int) -> None:
    engine.optimizer.clip_grad_norm_(0.01 * (1 + (rank == 1)))


def _scales(engine: Any, rank: int) -> None:
    engine.module[0].weight.grad.mul_(1 + (rank == 1))


def _replaces(engine: Any, rank: int) -> None:
    engine.module[0].weight.grad = torch.full((6, 6), 1.0 + (rank == 1))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "change", "told"),
    [
        *((stage, _clips, r"clip_grad_norm_\(\) has multiplied") for stage in range(4)),
        (0, _scales, "norm of gradients"), (0, _replaces, "norm of gradients"),
    ],
)  # fmt: skip
def test_gradients_that_ranks_change_otherwise_are_told(
    stage: int, change: Callable[[Any, int], None], told: str
) -> None:
    def job(rank: int) -> torch.Tensor:
        engine = start(stage)
        backward(engine, rank, 0)
        change(engine, rank)
        with pytest.raises(CollectiveMismatchError, match=f"{DIFFERS}.*{told}.*Nothing has changed"):
            engine.step()
        engine.zero_grad()
        backward(engine, rank, 0)
        change(engine, 0)  # the same on all of them
        engine.step()
        return engine.optimizer.consolidated_parameters()["0.weight"]

    found = sim.run(WORLD, job)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_loss_scale_of_one_rank_is_told(stage: int) -> None:
    def job(rank: int) -> None:
        engine = start(stage, fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 4})
        if rank == 1:
            engine.optimizer.scaler.scale = 64.0
        backward(engine, rank, 0)
        with pytest.raises(CollectiveMismatchError, match=r"the loss scale: 16 on ranks 0, 2, 64 on rank 1"):
            engine.step()

    sim.run(WORLD, job)
