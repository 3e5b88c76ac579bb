"""One rank's loss has no graph, or one that leads to no parameter, while the other ranks' lead to all: nobody waits.

What leads nowhere is zero in the mean. What has no graph is an error, of which the others hear in the step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError, RankFailedError
from zoo.engine import Engine, initialize
from zoo.shard.runtime.without_graph import NoGraphError
from zoo.zero import ZeroOptimizer

RATE = 0.1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def config(stage: int, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40},
        **more,
    }  # fmt: skip


def loss_of(model: Any, kind: str, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    if kind == "detached":
        return loss.detach()
    if kind == "constant":
        return torch.tensor(1.0)
    return x.clone().requires_grad_().sum() if kind == "inputs" else loss


def twin(steps: list[list[list[str]]]) -> dict[str, torch.Tensor]:
    """Plain torch; ``steps[s][i][r]`` is the kind of the loss of rank r in micro-batch i of step s."""
    model, number = net(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in steps:
        for kinds in step:
            for rank, kind in enumerate(kinds):
                loss = loss_of(model, kind, batch(rank, number))
                if loss.requires_grad:
                    (loss / len(kinds) / len(step)).backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


KINDS = st.sampled_from(["", "", "inputs"])


@given(
    st.integers(2, 3), st.integers(0, 3), st.integers(1, 2), st.data(), st.sampled_from([0.0, 1e9]),
    st.sampled_from([{}, {"fp16": {"enabled": False}}]),
)  # fmt: skip
def test_what_leads_nowhere_is_zero(
    world: int, stage: int, accumulation: int, data: st.DataObject, clip: float, more: dict[str, Any]
) -> None:
    steps = [[[data.draw(KINDS) for _ in range(world)] for _ in range(accumulation)] for _ in range(3)]
    for step in steps:
        step[0][0] = ""  # somebody has something

    def job(rank: int) -> dict[str, torch.Tensor]:
        engine, number = initialize(config(stage, accumulation, gradient_clipping=clip, **more), net())[0], 0
        for step in steps:
            for kinds in step:
                engine.backward(loss_of(engine, kinds[rank], batch(rank, number)))
                engine.step()
                number += 1
        return dict(engine.module_state_dict())

    expected = twin(steps)
    for found in sim.run(world, job):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@given(
    st.integers(2, 3), st.integers(0, 3), st.integers(1, 2), st.integers(0, 2), st.integers(0, 1),
    st.sampled_from(["detached", "constant"]), st.booleans(),
)  # fmt: skip
def test_what_has_no_graph_is_told_in_the_step(
    world: int, stage: int, accumulation: int, failing: int, at: int, kind: str, whole: bool
) -> None:
    """``whole``: by train_batch()."""
    failing, at = min(failing, world - 1), min(at, accumulation - 1)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.kinds = net(), [""]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss_of(self.net, self.kinds.pop(0), x)

    def step(engine: Engine, rank: int, number: int, kinds: list[str]) -> None:
        engine.module.kinds = list(kinds)
        if whole:
            engine.train_batch(iter([batch(rank, number + i) for i in range(accumulation)]))
            return
        error: Exception | None = None
        for i in range(accumulation):
            try:
                engine.backward(engine(batch(rank, number + i)))
            except NoGraphError as raised:
                error = raised
            engine.step()
        if error is not None:
            raise error

    def job(rank: int) -> dict[str, torch.Tensor]:
        engine = initialize(config(stage, accumulation), Loss())[0]
        kinds = [kind if i == at and rank == failing else "" for i in range(accumulation)]
        step(engine, rank, 0, [""] * accumulation)
        ends = NoGraphError if whole and rank == failing else CollectiveMismatchError
        told = (
            f"the loss of rank {rank} does not require grad"
            if ends is NoGraphError
            else (f"losses without a graph: .*1 on rank {failing}.*Nothing has changed.*call zero_grad.. on all ranks")
        )
        with pytest.raises(ends, match=told):
            step(engine, rank, accumulation, kinds)
        engine.zero_grad()
        step(engine, rank, accumulation, [""] * accumulation)
        assert engine.global_steps == 2
        return {name.removeprefix("net."): p for name, p in engine.module_state_dict().items()}

    expected = twin([[[""] * world] * accumulation] * 2)
    for found in sim.run(world, job):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2])
def test_where_no_rank_has_a_graph_nothing_moves(stage: int, world: int) -> None:
    def job(rank: int) -> None:
        engine = initialize(config(stage), net())[0]
        for number in range(2):  # a momentum
            engine.backward(loss_of(engine, "", batch(rank, number)))
            engine.step()
        before = {name: p.clone() for name, p in engine.module_state_dict().items()}
        with pytest.raises(NoGraphError, match="does not require grad"):
            engine.backward(loss_of(engine, "detached", batch(rank, 2)))
        engine.step()
        assert all(torch.equal(before[name], p) for name, p in engine.module_state_dict().items())

    sim.run(world, job)


@pytest.mark.parametrize("clip", [0.0, 1e9])
@pytest.mark.parametrize("stage", range(4))
def test_an_optimizer_alone(stage: int, clip: float) -> None:
    """Where no step compares anything the others hear of it when they have waited."""

    def job(rank: int) -> None:
        model = net()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, clip_norm=clip)
        loss = loss_of(model, "detached" if rank else "", batch(rank, 0))
        if rank:
            with pytest.raises(NoGraphError):
                optimizer.backward(loss)
        if clip and stage:
            if not rank:
                optimizer.backward(loss)
            with pytest.raises(CollectiveMismatchError, match="losses without a graph: 0 on rank 0, 1 on rank 1"):
                optimizer.step()
        elif not rank:
            with pytest.raises(RankFailedError, match="rank 1 failed with NoGraphError: the loss of rank 1"):
                optimizer.backward(loss)

    sim.run(2, job, group_timeout_s=5.0)


def test_at_stage_3_without_a_record_of_the_forward() -> None:
    """A rank whose forward was made without gradients cannot know what others gather in backward."""

    def job(rank: int) -> None:
        engine = initialize(config(3), net())[0]
        with torch.set_grad_enabled(rank == 0):
            loss = loss_of(engine, "", batch(rank, 0))
        with pytest.raises(RankFailedError if rank == 0 else NoGraphError, match="the loss of rank 1 does not require"):
            engine.backward(loss)

    sim.run(2, job, group_timeout_s=5.0)
