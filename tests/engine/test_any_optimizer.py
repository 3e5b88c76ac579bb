"""At stage 0 an engine runs and saves any optimizer, whatever it looks at and keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError
from zoo.engine import Engine, initialize

CONFIG = {"train_batch_size": 4, "gradient_accumulation_steps": 1}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.05)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.05)


def lookup(model: nn.Module) -> torch.optim.Optimizer:
    class Lookup(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if id(p) in self.slow:
                        p.grad.mul_(0.1)
            super().step()

    made = Lookup(model.parameters(), lr=0.05)
    made.slow = {id(p) for p in model[2].parameters()}  # type: ignore[attr-defined, index]
    return made


KINDS = {"Adafactor": adafactor, "Muon": muon, "by id": lookup}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(batch(rank, step)).square().mean())
        engine.step()


def values(engine: Engine) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_plain_torch_and_goes_on_from_a_checkpoint(kind: str, tmp_path: Path) -> None:
    plain = model_of()
    optimizer = KINDS[kind](plain)
    for step in range(4):
        sum(plain(batch(rank, step)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    def begin() -> Engine:
        model = model_of()
        return initialize(CONFIG, model, optimizer=KINDS[kind](model))[0]

    def fn(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        engine = begin()
        train(engine, rank, 0, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, rank, 2, 4)
        other = begin()
        other.load_checkpoint(tmp_path)
        train(other, rank, 2, 4)
        return values(engine), values(other)

    for straight, resumed in sim.run(2, fn):
        torch.testing.assert_close(straight, [p.detach() for p in plain.parameters()], rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, straight, resumed))


def test_the_states_of_another_optimizer_are_refused_by_name(tmp_path: Path) -> None:
    def fn(rank: int) -> None:
        model = model_of()
        engine = initialize(CONFIG, model, optimizer=adafactor(model))[0]
        train(engine, rank, 0, 1)
        engine.save_checkpoint(tmp_path)
        other = initialize(CONFIG, model_of(), optimizer=torch.optim.AdamW)[0]
        with pytest.raises(CheckpointError, match=r"Adafactor.*AdamW makes no step.*Continue with that optimizer"):
            other.load_checkpoint(tmp_path)
        third = initialize(CONFIG, model_of(), optimizer=torch.optim.SGD)[0]
        with pytest.raises(CheckpointError, match=r"col_var.*row_var.*Adafactor.*SGD keeps"):
            third.load_checkpoint(tmp_path)

    sim.run(2, fn)
