"""Arguments that differ between ranks are told at construction, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import Blocks, build, check, one_step, twin
from torch import nn

from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import Precision, ShardedModel, ZeroConfig, ZeroOptimizer

FP32_SUMS = Precision(reduce=torch.float32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lr": ({"lr": 0.1}, {"lr": 0.2}, r"lr: 0\.1 on rank 0, 0\.2 on rank 1"),
    "class": ({}, {"optimizer": torch.optim.AdamW}, r"optimizer: .*SGD on rank 0, .*AdamW on rank 1"),
    "option": ({}, {"momentum": 0.5}, r"momentum: 0.* on rank 0, 0\.5 on rank 1"),
    "clip_norm": ({"clip_norm": 0.01}, {}, r"clip_norm: 0\.01 on rank 0, 0\.0 on rank 1"),
    "loss_scale": ({"loss_scale": 8.0}, {"loss_scale": 16.0}, r"loss_scale: .*8\.0.* on rank 0, .*16\.0.* on rank 1"),
    "nonfinite": ({}, {"nonfinite_gradients": "error"}, r"nonfinite_gradients: 'skip' on rank 0, 'error' on rank 1"),
    "reduce": ({}, {"precision": FP32_SUMS}, r"Precision.reduce: None on rank 0, torch\.float32 on rank 1"),
    "accumulate": (
        {"precision": Precision(accumulate=torch.float32)},
        {},
        r"Precision.accumulate: torch\.float32 on rank 0, None on rank 1",
    ),
    "sparse_gradients": ({"sparse_gradients": True}, {}, r"sparse_gradients: True on rank 0, False on rank 1"),
    "check": ({}, {"check": True}, r"check: False on rank 0, True on rank 1"),
    "config": ({}, {"max_live_parameters": 5}, r"max_live_parameters: 0 on rank 0, 5 on rank 1"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named(stage: int, case: str) -> None:
    first, second, words = CASES[case]

    def fn(rank: int) -> None:
        model = Blocks()
        with pytest.raises(CollectiveMismatchError, match=words):
            build(stage, model, **(second if rank else first))
        _, optimizer = build(stage, model)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


def test_an_option_of_one_of_several_groups() -> None:
    def fn(rank: int) -> None:
        model = Blocks()
        groups = [{"params": [*model.first.parameters()]}, {"params": [*model.blocks.parameters()], "lr": 0.1 + rank}]
        groups.append({"params": [*model.last.parameters()]})
        with pytest.raises(CollectiveMismatchError, match=r"lr of group 1: 0\.1 on rank 0, 1\.1 on rank 1"):
            ZeroOptimizer(model, stage=2, optimizer=torch.optim.SGD, lr=0.1, params=groups)

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_class_here_and_an_instance_there_are_alike() -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        given: dict[str, Any] = {"optimizer": torch.optim.SGD, "lr": 0.1}
        if rank == 1:
            given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        optimizer = ZeroOptimizer(model, stage=2, **given)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn, group_timeout_s=5.0)


OTHERS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "shape": (lambda r: nn.Linear(2, 2 + r), r"'weight' is \(2, 2\) float32 on rank 0, \(3, 2\) float32 on rank 1"),
    "type": (lambda r: nn.Linear(2, 2).to([torch.float32, torch.bfloat16][r]), r"'weight' is .* bfloat16 on rank 1"),
    "frozen": (lambda r: nn.Linear(2, 2).requires_grad_(r == 0) if r == 0 else half_frozen(), r"'bias' is .*frozen on"),
    "more": (
        lambda r: nn.Sequential(*[nn.Linear(2, 2)] + [nn.Linear(2, 2)] * r),
        r"'1\.weight' is not there on rank 0",
    ),
}


def half_frozen() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    return layer


@pytest.mark.parametrize("kind", list(OTHERS))
@pytest.mark.parametrize("stage", [0, 2])
def test_of_another_model_the_first_parameter_that_differs_is_told(kind: str, stage: int) -> None:
    make, told = OTHERS[kind]

    def fn(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError, match=rf"the parameters and their groups: .*{told}"):
            ZeroOptimizer(make(rank), stage=stage, optimizer=torch.optim.SGD, lr=0.1)

    sim.run(2, fn, group_timeout_s=5.0)


def test_a_model_without_an_optimizer() -> None:
    def fn(rank: int) -> None:
        with pytest.raises(CollectiveMismatchError, match="trains: True on rank 0, False on rank 1"):
            ShardedModel(nn.Linear(2, 2), config=ZeroConfig(stage=2), trains=rank == 0)

    sim.run(2, fn, group_timeout_s=5.0)
