"""Jobs of a second whose size, and whose mistakes, are options."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from zoo.registry import CORE, Registry


class Block(nn.Module):
    """A perceptron with dropout, added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    """Blocks, and the mean square of what is left; ``fault`` in the forward."""

    def __init__(self, width: int, layers: int, fault: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.last = nn.Linear(width, 1)
        self.fault = fault

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.device.type != "meta":
            fail(self.fault, len(x))
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - y).square().mean()


def fail(fault: str, rows: int) -> None:
    """What a model may do to its process."""
    if fault == "memory":
        raise MemoryError("no room for the activations")
    if fault == "memory above 4" and rows > 4:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "wrong":
        raise ValueError("the shapes do not fit")
    if fault == "hangs":
        time.sleep(1000)
    if fault.startswith("slow"):
        time.sleep(0.05)


class MlpTask:
    """Regression. ``fault``: see :func:`fail`."""

    unit, units_per_sample = "sample", 1

    def __init__(self, *, seed: int, width: int = 8, layers: int = 2, rows: int = 64, fault: str = "") -> None:
        self.seed, self.width, self.layers, self.rows, self.fault = seed, width, layers, rows, fault

    def describe(self) -> list[str]:
        return ["a tiny task"]

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Net(self.width, self.layers, self.fault)

    def training_data(self) -> Dataset[Any]:
        dice = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, self.width, generator=dice)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def validation_data(self) -> Dataset[Any]:
        return TensorDataset(torch.ones(4, self.width), torch.zeros(4, 1))

    def baseline(self) -> tuple[str, float] | None:
        return None

    def sample(self, model: nn.Module) -> str:
        return ""


def registry() -> Registry:
    found = Registry(CORE, origin="core")
    found.register("task", "mlp", MlpTask)
    return found


def document(out: Path, batch: int = 8, **params: Any) -> dict[str, Any]:
    return {
        "train_batch_size": batch, "steps_per_print": None, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "comm": {"timeout_s": 60},
        "train": {"task": {"type": "mlp", "params": params}, "steps": 4, "out": str(out / "run"), "threads": 1},
        "autotuning": {
            "results_dir": str(out / "results"), "exps_dir": str(out / "trials"), "least_s": 0.0, "timeout_s": 60.0,
        },
    }  # fmt: skip
