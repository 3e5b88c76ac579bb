"""Weights of layers that were measured."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.pipe import LayerSpec, PipelineModule, TiedLayerSpec, measure, split


class Sleep(nn.Module):
    """Forward and backward that take a time of their own."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.times = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.times[0])
        out = x * self.weight
        if out.requires_grad:
            out.register_hook(lambda grad: time.sleep(self.times[1]))
        return out


def test_time_is_that_of_forward_and_backward() -> None:
    layers = [LayerSpec(Sleep, 0.03, 0.03), Sleep(0.0, 0.0), Sleep(0.02, 0.0), LayerSpec(Sleep, 0.0, 0.09)]
    weights = measure(layers, torch.ones(2), repeats=1)
    # Sleeping never takes less; on a busy machine it takes more, so that only these bounds are certain.
    assert [w >= least for w, least in zip(weights, (0.06, 0.0, 0.02, 0.09), strict=True)] == [True] * 4
    assert weights[1] < min(weights[0], weights[3])


def test_the_median_does_not_mind_one_slow_turn() -> None:
    turns = iter([0.3, 0.0, 0.3, 0.0])  # the first one does not count

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(next(turns))
            return x

    (weight,) = measure([Slow()], torch.ones(2), repeats=3)
    assert weight < 0.3
    assert next(turns, None) is None


def test_memory_is_what_autograd_keeps_and_parameters() -> None:
    layers = [LayerSpec(nn.Linear, 4, 8), torch.tanh, nn.Linear(8, 2, bias=False), LayerSpec(nn.ReLU)]
    x = torch.ones(3, 4)
    parameters = [4 * (4 * 8 + 8), 0, 4 * 8 * 2, 0]
    # Input of the first; output of tanh, which is the input of the next; nothing new; output of ReLU.
    activations = [4 * 3 * 4, 4 * 3 * 8, 0, 4 * 3 * 2]
    for in_flight in (1, 5):
        expected = [p + in_flight * a for p, a in zip(parameters, activations, strict=True)]
        assert measure(layers, x, what="memory", in_flight=in_flight) == expected


def test_a_tied_layer_is_one_module_and_its_parameters_count_at_each_use() -> None:
    layers = [
        TiedLayerSpec("w", nn.Linear, 4, 4, bias=False), torch.tanh,
        TiedLayerSpec("w", nn.Linear, 4, 4, bias=False, forward_fn=lambda m, x: x @ m.weight.T),
    ]  # fmt: skip
    assert measure(layers, torch.ones(3, 4), what="memory") == [64 + 48, 48, 64]


def test_gradients_random_numbers_and_values_stay_as_they_are() -> None:
    layer = nn.Linear(4, 4)
    layer.weight.grad = torch.ones(4, 4)
    before = torch.random.get_rng_state()
    measure([layer, LayerSpec(nn.Linear, 4, 4), nn.Dropout()], torch.ones(3, 4), repeats=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(layer.weight.grad, torch.ones(4, 4))
    assert layer.bias.grad is None


def test_all_ranks_cut_as_rank_0_measured() -> None:
    def one(rank: int) -> tuple[list[float], list[int]]:
        layers: list[Any] = [Sleep(0.001 * (1 + rank * n), 0.0) for n in range(5)]
        weights = measure(layers, torch.ones(2), repeats=1)
        return weights, PipelineModule(layers, num_stages=2, partition_method=weights).bounds

    (first, bounds), (second, others) = sim.run(2, one)
    assert first == second
    assert bounds == others


def test_layers_of_a_traced_model_are_measured_as_well() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    whole = split(model, num_stages=1, example=torch.ones(3, 4))
    weights = measure(whole, torch.ones(3, 4), what="memory")
    assert weights == [160 + 48, 288 + 96, 72 + 96]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="what='speed'; allowed are 'time' and 'memory'"):
        measure([nn.Linear(4, 4)], torch.ones(3, 4), what="speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="repeats=0"):
        measure([nn.Linear(4, 4)], torch.ones(3, 4), repeats=0)
    with pytest.raises(RuntimeError, match="layer 1 failed while it was measured"):
        measure([nn.Linear(4, 4), nn.Linear(5, 4)], torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"partition_method='time': measure it before, .*what='time'"):
        PipelineModule([nn.Linear(4, 4)], num_stages=1, partition_method="time")

    def one(rank: int) -> None:
        measure([nn.Linear(4, 4), nn.Linear(5, 4)], torch.ones(3, 4), repeats=1)

    with pytest.raises(sim.RankError, match=r"rank 0 raised RuntimeError: layer 1 failed"):
        sim.run(2, one)


@pytest.mark.parametrize("what", ["time", "memory"])
def test_layers_that_change_their_input_or_their_buffers(what: Any) -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    layers = [Adds(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.BatchNorm1d(4), Adds(), nn.Linear(4, 4)]
    sample, state = torch.zeros(3, 4), copy.deepcopy(nn.ModuleList(layers).state_dict())
    random = torch.get_rng_state()
    assert len(measure(layers, sample, what=what)) == 6
    assert torch.equal(sample, torch.zeros(3, 4))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in nn.ModuleList(layers).state_dict().items())
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_buffers_of_traced_layers_come_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    whole = split(model, num_stages=1, example=torch.ones(3, 4))
    before = copy.deepcopy(whole.state_dict())
    measure(whole, torch.randn(3, 4), repeats=1)
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


def test_what_no_stage_can_send_is_said() -> None:
    with pytest.raises(RuntimeError, match=r"layer 0 failed .*has a object at .1., which cannot go from one pipeline"):
        measure([lambda x: (x, object())], torch.ones(3, 4))
