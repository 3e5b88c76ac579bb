"""What only one rank does wrong is told to all of them, and all go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.engine import Engine, initialize

WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.first(x))).square().mean()
        return out


def start(stage: int) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    return initialize(config, Net())[0]


def step(engine: Engine, rank: int, number: int) -> None:
    engine.backward(engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))))
    engine.step()


def client_state(engine: Engine, rank: int, folder: Path) -> None:
    engine.save_checkpoint(folder, client_state=5 if rank else {})  # type: ignore[arg-type]


def save_here(engine: Engine, rank: int, folder: Path) -> None:
    engine.save_checkpoint(None if rank else folder)  # type: ignore[arg-type]


def load_here(engine: Engine, rank: int, folder: Path) -> None:
    engine.load_checkpoint(5 if rank else folder)  # type: ignore[arg-type]


def load_tag(engine: Engine, rank: int, folder: Path) -> None:
    engine.load_checkpoint(folder, tag=5 if rank else "a")  # type: ignore[arg-type]


def weights_here(engine: Engine, rank: int, folder: Path) -> None:
    engine.save_16bit_model(None if rank else folder)  # type: ignore[arg-type]


def weights_called(engine: Engine, rank: int, folder: Path) -> None:
    engine.save_16bit_model(folder, "a/b" if rank else "model.safetensors")


def other_values(engine: Engine, rank: int, folder: Path) -> None:
    state = {name: value + 0.5 * rank for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict(state)


def another_shape(engine: Engine, rank: int, folder: Path) -> None:
    state = {"module": {name: value[rank:] for name, value in engine.module_state_dict().items()}}
    engine.load_module_state_dict(state)


CASES: list[tuple[Callable[[Engine, int, Path], None], str]] = [
    (client_state, "rank 1: client_state is a int; it is a mapping"),
    (save_here, "rank 1: the directory None is a NoneType; it is a path"),
    (load_here, "rank 1: the directory 5 is a int; it is a path"),
    (load_tag, "rank 1: the tag 5 is a int; it is the name of a checkpoint"),
    (weights_here, "rank 1: the directory None is a NoneType; it is a path"),
    (weights_called, "rank 1: filename='a/b'; it is the name of a file in the folder"),
    (other_values, "rank 1 gave other values than rank 0, of 4 parameters, such as 'first.bias'"),
    (another_shape, "rank 1 gave other values than rank 0, of 4 parameters"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("wrong", "sentence"), CASES)
def test_a_rank_that_is_wrong_alone(
    tmp_path: Path, stage: int, wrong: Callable[[Engine, int, Path], None], sentence: str
) -> None:
    def job(rank: int) -> bool:
        engine, twin = start(stage), start(stage)
        for one in (engine, twin):
            step(one, rank, 0)
        with pytest.raises(CheckpointError, match=sentence):
            wrong(engine, rank, tmp_path)
        for one in (engine, twin):
            step(one, rank, 1)
        found, expected = engine.module_state_dict(), twin.module_state_dict()
        return all(torch.equal(found[name], value) for name, value in expected.items())

    assert sim.run(WORLD, job) == [True] * WORLD


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_may_have_buffers_of_their_own(stage: int) -> None:
    def job(rank: int) -> Any:
        engine = start(stage)
        engine.module.seen.fill_(rank)
        state = {name: value + 1 for name, value in engine.module_state_dict().items()}
        engine.load_module_state_dict(state)
        return float(engine.module.seen[0]), engine.module_state_dict()["head.bias"] - Net().head.bias.detach()

    for rank, (seen, change) in enumerate(sim.run(WORLD, job)):
        assert seen == rank + 1
        assert change == 1
