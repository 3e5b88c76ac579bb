"""Optimizers that compress, by their names in a document, through the engine: training, saving, resuming."""

from __future__ import annotations

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
