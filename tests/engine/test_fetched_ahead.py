"""Programs that fetch batches of the engine's plain loader ahead: a checkpoint stands before those that have not
trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from zoo import sim
from zoo.engine import Engine, RepeatingLoader, ShardedLoader, initialize


class Mean(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mean()


def start(samples: int = 20) -> Engine:
    torch.manual_seed(0)
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    data = TensorDataset(torch.arange(float(samples)).reshape(-1, 1))
    return initialize(document, Mean(1, 1), training_data=data)[0]


def train(engine: Engine, batches: Iterator[Any], steps: int, ahead: int = 0, *, moved: bool = False) -> list[float]:
    """What was trained on, with ``ahead`` more fetched; ``moved``: as copies, as on a GPU."""
    fetched, used = list[torch.Tensor](), []
    for _ in range(steps):
        while len(fetched) <= ahead:
            (batch,) = next(batches)
            fetched.append(batch.clone() if moved else batch)
        batch = fetched.pop(0)
        used += batch.flatten().tolist()
        engine.backward(engine(batch))
        engine.step()
    return used


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("ahead", "ranks"), [(1, 2), (4, 1), (9, 1)])
def test_a_checkpoint_stands_before_what_has_not_trained(ahead: int, ranks: int, moved: bool, tmp_path: Path) -> None:
    def job(rank: int) -> None:
        plain, engine, again = start(), start(), start()
        expected = train(plain, iter(RepeatingLoader(plain.dataloader)), 9)
        assert train(engine, iter(RepeatingLoader(engine.dataloader)), 3, ahead, moved=moved) == expected[:6]
        engine.save_checkpoint(tmp_path)
        again.load_checkpoint(tmp_path)
        assert train(again, iter(RepeatingLoader(again.dataloader)), 6) == expected[6:]

    sim.run(ranks, job)


def test_batches_that_are_only_looked_at_do_not_count() -> None:
    engine = start()
    loader = engine.dataloader
    for _ in loader:  # a mean of all data, say
        pass
    assert loader.state_dict()["epoch"] == 1
    used = train(engine, iter(loader), 3, moved=True)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 6)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    assert len(used) == len(train(engine, batches, 1)) + 4  # those before it are left out
    assert loader.state_dict()["position"] == 12


def test_a_model_that_is_called_without_the_engine_is_not_followed() -> None:
    engine = start(4000)
    for number, (batch,) in enumerate(engine.dataloader, 1):
        engine.backward(engine.module(batch))
        engine.step()
        assert engine.dataloader.state_dict()["position"] == 2 * number
        if number == 1200:
            break
    assert engine.dataloader.unused is None  # nothing is kept of so many


def test_a_loader_of_its_own_counts_what_it_has_handed_out() -> None:
    loader: ShardedLoader[Any] = ShardedLoader(TensorDataset(torch.arange(20.0)), 2)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.state_dict()["position"] == 6
