"""Optimizers that compress, by their names in a document, through the engine: training, saving, resuming."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo import sim
from zoo.engine import Engine

from .test_engine import start

WAYS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 0.01, "freeze_step": 2, "cuda_aware": False, "comm_backend_name": "nccl"},
    "OneBitLamb": {"lr": 0.01, "freeze_step": 2, "coeff_beta": 0.5, "max_coeff": 5.0},
    "ZeroOneAdam": {"lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4},
    "DiLoCo": {"lr": 0.01, "sync_every": 3},
}


def train(engine: Engine, steps: int) -> list[float]:
    return [float(engine.train_batch()) for _ in range(steps)]


def values(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


@pytest.mark.matrix
@pytest.mark.parametrize("name", WAYS)
def test_a_document_names_it_and_a_checkpoint_goes_on(name: str, tmp_path: Path) -> None:
    """The same bits as without a stop, also between two steps in which ranks agree."""
    changes = {"optimizer": {"type": name, "params": WAYS[name]}, "zero_optimization": {"stage": 0}}

    def first(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(changes)
        train(engine, 5)
        engine.save_checkpoint(tmp_path)
        saved = values(engine)
        train(engine, 3)
        return saved, values(engine)

    def second(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = start(changes)
        engine.load_checkpoint(tmp_path)
        loaded = values(engine)
        train(engine, 3)
        return loaded, values(engine)

    for one, other in zip(sim.run(2, first), sim.run(2, second), strict=True):
        for before, after in zip(one, other, strict=True):
            assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize(("accumulation", "alike"), [(1, [[0], [1, 2, 3]]), (2, [[0], [1], [2, 3]])])
def test_which_stages_have_the_same_bits(accumulation: int, alike: list[list[int]]) -> None:
    """As optim/README.md says: stage 0 sends other messages after the warm-up, and stages 2 and 3 compress each
    micro-batch."""

    def fn(rank: int, stage: int) -> list[dict[str, torch.Tensor]]:
        engine = start({
            "train_batch_size": 8 * accumulation, "gradient_accumulation_steps": accumulation, "scheduler": None,
            "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}},
            "zero_optimization": {"stage": stage},
        })  # fmt: skip
        found = []
        for _ in range(5):
            train(engine, 1)
            found.append({name: v.clone() for name, v in engine.optimizer.consolidated_parameters().items()})
        return found

    runs = {stage: sim.run(2, lambda rank, stage=stage: fn(rank, stage))[0] for stage in range(4)}

    def same(one: int, other: int, step: int) -> bool:
        a, b = runs[one][step], runs[other][step]
        return all(torch.equal(a[name], b[name]) for name in a)

    assert all(same(0, 1, step) for step in range(2))
    for stages in alike:
        assert all(same(stages[0], stage, 4) for stage in stages)
    for one, other in itertools.pairwise(alike):
        assert not same(one[0], other[0], 4)
