"""Compressed stages of a pipeline compute what one process does, at every ZeRO stage, under any schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.compression.models import Words, inputs, weights
from torch import Tensor, nn

import zoo.engine
from zoo import sim
from zoo.compression import transforms_of
from zoo.pipe import LayerSpec, PipelineModule, split

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


@pytest.mark.matrix
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


LEARNED = {
    "sparse_pruning": {
        "shared_parameters": {"enabled": True, "method": "topk"},
        "different_groups": {"g": {"modules": ["head"], "params": {"dense_ratio": 0.4}}},
    }
}
MAGNITUDE = copy.deepcopy(LEARNED)
MAGNITUDE["sparse_pruning"]["shared_parameters"].update(method="l1", schedule_offset=1)


def traced(num_stages: int, section: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """A model whose head is tied to the table of its embedding."""
    torch.set_num_threads(1)
    x = torch.arange(8).reshape(2, 4)
    model = split(Words().double(), num_stages=num_stages, example={"x": x, "y": x})
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "seed": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}}, "compression_training": section,
    }  # fmt: skip
    engine, *_ = zoo.engine.initialize(config, model)
    batches = [{"x": (x + 3 * n) % 12, "y": (x + 3 * n + 1) % 12} for n in range(8)]
    losses = [float(engine.train_batch(iter(batches[2 * step : 2 * step + 2]))) for step in range(4)]
    return losses, engine.optimizer.consolidated_parameters()


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize(
    "section",
    [
        {"weight_quantization": weights("head", start=5, target=3, rounding="stochastic")},
        {"weight_quantization": weights("embed", start=5, target=3)},
        MAGNITUDE,
    ],
    ids=["of the head", "of the table", "masked"],
)
def test_a_weight_of_two_stages_is_changed_in_both_whichever_a_pattern_means(section: dict[str, Any]) -> None:
    ((losses, values),) = sim.run(1, lambda rank: traced(1, section))
    ((plain, _),) = sim.run(1, lambda rank: traced(1, {}))
    assert losses != plain
    for found, parameters in sim.run(2, lambda rank: traced(2, section)):
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(value, values[name], rtol=1e-8, atol=1e-11)


def test_what_is_refused_of_a_weight_that_has_two_names() -> None:
    def job(rank: int) -> None:
        with pytest.raises(ValueError, match="Let the patterns mean both names, or neither"):
            traced(2, LEARNED)
        with pytest.raises(ValueError, match="would have it changed in different ways"):
            traced(2, {"weight_quantization": weights()})  # a table has a scale for each row, a linear layer one

    sim.run(2, job)
