"""``deepspeed.runtime.utils`` against what DeepSpeed's functions gave, written down; and ``deepspeed.utils.timer``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.runtime import utils
from zoo.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer

from zoo import sim
from zoo.deepspeed.adapters.communication import groups

BALANCED = json.loads((Path(__file__).parent / "partitions.json").read_text())["rows"]


@pytest.mark.parametrize("row", BALANCED, ids=lambda row: f"{row['weights']}/{row['parts']}")
def test_balanced_partitions_are_those_of_deepspeed(row: dict[str, Any]) -> None:
    assert utils.partition_balanced(row["weights"], row["parts"]) == row["bounds"]


@pytest.mark.parametrize(
    ("given", "clipped"),
    [
        ([3.0, 4.0], [0.6, 0.8]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([1.0, math.nan], [math.nan, math.nan]),
        ([1.0, math.inf], [0.0, math.nan]),
    ],
)
def test_a_norm_that_is_not_finite_reaches_all_gradients(given: list[float], clipped: list[float]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor(given)
    utils.clip_grad_norm_([parameter], 1.0)
    torch.testing.assert_close(parameter.grad, torch.tensor(clipped), equal_nan=True)


def test_a_timer_that_is_stopped_keeps_its_time_and_throughput_knows_whether_it_began() -> None:
    timer = SynchronizedWallClockTimer()("step")
    for given in ({"reset": True}, {"record": True}):
        timer.start()
        timer.stop(**given)
    assert timer.elapsed(reset=False) > 0
    assert timer.mean() * 2 == pytest.approx(timer.elapsed())
    for enabled in (False, True):
        throughput = ThroughputTimer(SimpleNamespace(enabled=enabled, synchronized=False), 1)
        assert not throughput.initialized
        throughput.start()
        assert throughput.initialized is enabled


def _experts(rank: int, world: int) -> list[nn.Parameter]:
    """A parameter of all ranks, and one of an expert."""
    shared, expert = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    shared.grad, expert.grad = torch.ones(1), torch.full((1,), rank + 1.0)
    expert.allreduce = False  # type: ignore[attr-defined]
    groups._create_expert_and_data_parallel(world)
    return [shared, expert]


@pytest.mark.parametrize("norm_type", [1, 2, 3, math.inf])
def test_ranks_with_different_experts_scale_by_one_factor(norm_type: float) -> None:
    def clip(rank: int) -> tuple[float, list[float]]:
        parameters = _experts(rank, 2)
        norm = utils.clip_grad_norm_(parameters, 0.1, norm_type)
        return float(norm), [p.grad.item() for p in parameters if p.grad is not None]

    here, there = sim.run(2, clip)
    norms = [torch.tensor([1.0, rank + 1.0]).norm(norm_type).item() for rank in range(2)]
    mean = sum(norms) / 2  # DeepSpeed's
    assert here[0] == there[0] == pytest.approx(mean)
    for rank, found in enumerate((here[1], there[1])):
        assert found == pytest.approx([0.1 / mean, (rank + 1) * 0.1 / mean], rel=1e-5)


def test_a_norm_that_is_not_finite_on_one_rank_reaches_the_gradients_of_all() -> None:
    def clip(rank: int) -> list[float]:
        parameters = _experts(rank, 2)
        if rank:
            parameters[1].grad = torch.tensor([math.nan])
        assert math.isnan(utils.clip_grad_norm_(parameters, 0.1))
        return [p.grad.item() for p in parameters if p.grad is not None]

    assert all(math.isnan(value) for values in sim.run(2, clip) for value in values)


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan, torch.tensor([2.0, math.inf])])
def test_an_overflow_of_one_expert_is_known_to_the_ranks_that_share_experts(bad: Any) -> None:
    def check(rank: int) -> tuple[bool, ...]:
        parameters = _experts(rank, 2)
        norms = [bad if rank == 3 else 1.0]
        checker = utils.CheckOverflow([parameters])
        alone = utils.CheckOverflow([parameters[:1]])
        return (
            checker.check_using_norm(norms, reduce_overflow=False), checker.check_using_norm(norms),
            checker.check_using_norm([1.0], reduce_overflow=False),
            alone.check_using_norm(norms, reduce_overflow=False),
        )  # fmt: skip

    assert sim.run(4, check) == [
        (rank >= 2, True, False, rank == 3) for rank in range(4)  # consecutive ranks share the experts
    ]  # fmt: skip


def test_an_overflow_is_known_to_the_ranks_of_an_mpu() -> None:
    def check(rank: int) -> bool:
        pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
        mpu = SimpleNamespace(get_model_parallel_group=lambda: pairs[rank // 2])
        return bool(utils.CheckOverflow([[]], mpu=mpu).check_using_norm([-1.0 if rank == 0 else 1.0], False))

    assert sim.run(4, check) == [True, True, False, False]
