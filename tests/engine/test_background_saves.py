"""Gloo processes whose checkpoints are written while they train: it disturbs nothing, and what is there is what was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import run_ranks
from torch import nn

from zoo.engine import initialize


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)], nn.Linear(128, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - y).square().mean()


def train(rank: int, folder: str, number: int, asynchronous: bool) -> tuple[list[float], list[float], bool]:
    """Losses with saves in between; those after the last checkpoint is loaded again; whether a save was under way."""
    config = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": number}, "checkpoint": {"asynchronous": asynchronous},
    }  # fmt: skip
    engine: Any = initialize(config, Loss())[0]
    dice = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 128, generator=dice) for _ in range(12)]
    losses, under_way = [], False
    for step, x in enumerate(batches):
        if step % 3 == 2 or step == 9:
            engine.save_checkpoint(folder, f"s{step}", {"step": step})
            under_way |= engine._saver is not None and engine._saver.pending
        losses.append(float(engine.train_batch(iter([(x, x.sum(1, keepdim=True))]))))
    _, client = engine.load_checkpoint(folder, "s9")
    assert client == {"step": 9}
    again = [float(engine.train_batch(iter([(x, x.sum(1, keepdim=True))]))) for x in batches[9:]]
    engine.destroy()
    return losses, again, under_way


@pytest.mark.parametrize("number", [1, 3])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, number: int) -> None:
    expected = run_ranks(2, train, str(tmp_path / "a"), number, False)
    found = run_ranks(2, train, str(tmp_path / "b"), number, True)
    for rank, (losses, again, under_way) in found.items():
        assert losses == expected[rank][0]
        assert again == losses[9:] == expected[rank][1]
        assert under_way
        assert not expected[rank][2]
