"""Compressed stages of a pipeline compute what one process does, at every ZeRO stage, under any schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compression.models import inputs, weights
from torch import Tensor, nn

import zoo.engine
from zoo import sim
from zoo.compression import transforms_of
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, NUM_MICRO = 6, 4


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


BOTH = {
    "weight_quantization": weights("fc", start=5, target=3, rounding="stochastic", schedule_offset=1),
    "activation_quantization": inputs(r"^[13]\.", bits=5, range_calibration="dynamic"),
}


def run(
    num_stages: int, stage: int, section: dict[str, Any], schedule: str = "1f1b", *, layers: Any = None
) -> tuple[list[float], Any, list[str]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PipelineModule(
        layers or [LayerSpec(Dense) for _ in range(4)], num_stages=num_stages, loss_fn=nn.functional.mse_loss,
        partition_method="uniform", seed_layers=True, schedule=schedule,
    )  # fmt: skip
    model.double()
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": NUM_MICRO, "seed": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "zero_optimization": {"stage": stage}, "compression_training": section,
    }  # fmt: skip
    engine, *_ = zoo.engine.initialize(config, model)
    losses = []
    for step in range(3):
        batches = []
        for micro in range(NUM_MICRO):
            dice = torch.Generator().manual_seed(10 * step + micro)
            x = torch.randn(2, WIDTH, generator=dice, dtype=torch.float64)
            batches.append((x, x.roll(1, 0)))
        losses.append(float(engine.train_batch(iter(batches))))
    return losses, engine.optimizer.consolidated_parameters(), [t.site.name for t in transforms_of(engine.module)]


@pytest.mark.parametrize(("world", "stage", "schedule"), [(2, 0, "1f1b"), (4, 1, "gpipe"), (2, 1, "zb_v")])
def test_stages_compute_what_one_process_does(world: int, stage: int, schedule: str) -> None:
    (losses, values, names), *_ = sim.run(1, lambda rank: run(1, 0, BOTH))
    assert names == ["0.fc.weight", "1.fc.weight", "1.fc:input", "2.fc.weight", "3.fc.weight", "3.fc:input"]
    found = sim.run(world, lambda rank: run(world, stage, BOTH, schedule))
    assert sorted(name for *_, there in found for name in there) == names
    for theirs, parameters, _ in found:
        torch.testing.assert_close(theirs, losses, rtol=1e-9, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(value, values[name], rtol=1e-8, atol=1e-11)


def refused(section: dict[str, Any], layers: Any = None) -> str:
    def job(rank: int) -> str:
        with pytest.raises(ValueError) as error:
            run(2, 0, section, layers=layers)
        return str(error.value)

    first, second = sim.run(2, job)
    assert first == second
    return first


def test_what_is_wrong_on_one_stage_is_raised_on_all() -> None:
    assert "the pattern 'fcc' matches no module" in refused({"weight_quantization": weights("fcc")})
    assert "0.fc.weight has (6, 6) = 36 elements" in refused({"weight_quantization": weights("^0", quantize_groups=5)})
    one = ("fc", nn.Linear, WIDTH, WIDTH)
    tied = [TiedLayerSpec(*one), LayerSpec(Dense), TiedLayerSpec(*one)]
    assert "is one with a weight of another stage" in refused({"weight_quantization": weights()}, tied)
    assert "has a state that does not follow" in refused(
        {"activation_quantization": inputs(range_calibration="static")}
    )
