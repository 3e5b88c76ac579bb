"""A training job of a second, for tests of what surrounds the training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from zoo.config import Config
from zoo.registry import CORE, Registry
from zoo.train import read_config


class Log(nn.Module):
    """log of what comes in: not finite where that is not positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x)


class Net(nn.Module):
    """Regression with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.log = Log()
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.drop(self.first(x)))
        hidden = self.log(hidden + 2.0 - y)  # y is below 1, but where a test says otherwise
        return (self.last(hidden) - y).square().mean()


class TinyTask:
    """Options: ``bad``, a sample whose target breaks the forward; ``rows``, the size of the data set."""

    unit = "sample"
    units_per_sample = 1

    def __init__(self, *, seed: int, bad: int = -1, rows: int = 64) -> None:
        self.seed, self.bad, self.rows = seed, bad, rows

    def describe(self) -> list[str]:
        return ["a tiny task"]

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Net()

    def training_data(self) -> Dataset[Any]:
        dice = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, 3, generator=dice)
        y = torch.tanh(x.sum(1, keepdim=True)) * 0.9
        if self.bad >= 0:
            y[self.bad] = 5.0
        return TensorDataset(x, y)

    def validation_data(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(4, 3), torch.zeros(4, 1))

    def baseline(self) -> tuple[str, float] | None:
        return None

    def sample(self, model: nn.Module) -> str:
        return ""


def registry() -> Registry:
    found = Registry(CORE, origin="core")
    found.register("task", "tiny", TinyTask)
    return found


def document(out: Path, **train: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_print": None, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
        "train": {
            "task": {"type": "tiny"}, "steps": 12, "out": str(out), "checkpoint_every": 4, "validate_every": None,
            "threads": 1, **train,
        },
    }  # fmt: skip


def config(out: Path, world_size: int = 1, changes: dict[str, Any] | None = None, **train: Any) -> Config:
    overrides = [f"{key}={value}" for key, value in (changes or {}).items()]
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(world_size)
    try:
        return read_config(document(out, **train), overrides, registry=registry())
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before
