"""Tied weights, and modules of two names, inside of a pipeline: whole state dicts have them under each name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.engine import initialize
from zoo.pipe import LayerSpec, PipelineModule

CONFIG = {
    "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1},
}  # fmt: skip


class Tied(nn.Module):
    """Two linears of one weight, and a norm, which has buffers, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.b.weight, self.again = self.a.weight, self.norm

    def forward(self, x: torch.Tensor) -> Any:
        return self.again(self.norm(self.b(torch.tanh(self.a(x)))))


def pipeline(stages: int) -> PipelineModule:
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, 6, 6), LayerSpec(Tied), LayerSpec(nn.Linear, 6, 6), LayerSpec(Tied)]
    return PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")


@pytest.mark.parametrize("stages", [1, 2])
def test_whole_state_dicts_have_every_name_and_are_taken_back(stages: int, tmp_path: Path) -> None:
    def job(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine = initialize(CONFIG, pipeline(stages))[0]
        x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
        engine.train_batch(iter(zip(x, x.flip(0), strict=True)))
        state = engine.module_state_dict()
        engine.save_16bit_model(tmp_path, "m.bin")
        engine.load_module_state_dict({name: value.clone() for name, value in state.items()})
        return state, engine.module_state_dict()

    names = sim.run(1, lambda rank: list(initialize(CONFIG, pipeline(1))[0].module.state_dict()))[0]
    for state, again in sim.run(stages, job):
        assert list(state) == list(again) == names
        for name, value in state.items():
            assert torch.equal(value, again[name]), name
            assert name.split(".")[1] != "b" or "weight" not in name or value is state[name.replace(".b.", ".a.")]
        file = torch.load(tmp_path / "m.bin", weights_only=True)
        assert sorted(file) == sorted(names)
        assert all(torch.equal(value, file[name]) for name, value in state.items())
