"""What the four components compute, under their names in zoo's registry, and in an engine on simulated ranks."""

from __future__ import annotations

import pytest
import torch

from zoo import registry, sim
from zoo.comm import Communicator
from zoo.engine import initialize
from zoo.moe import GroupedExperts, MixtureOfExperts

KINDS = {"moe_gate": "temperature", "optimizer": "SignMomentum", "lr_schedule": "InverseSqrt", "compressor": "half"}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_zoo_finds_it_by_its_entry_point(kind: str, name: str) -> None:
    assert name in registry.names(kind)
    assert "zoo-example" in str(registry.entry(kind, name))


def test_the_optimizer_takes_steps_of_one_size() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = registry.build("optimizer", "SignMomentum", {"lr": 0.5, "beta": 0.0}, params=[p])
    (p * torch.tensor([4.0, -1.0, 0.0])).sum().backward()
    optimizer.step()
    assert p.tolist() == [0.5, -1.5, 3.0]
    with pytest.raises(ValueError, match="it is from 0 to below 1"):
        registry.build("optimizer", "SignMomentum", {"beta": 1.0}, params=[p])


def test_the_schedule_rises_and_falls() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.8)
    schedule = registry.build("lr_schedule", "InverseSqrt", {"warmup_num_steps": 4}, optimizer=optimizer)
    rates = [schedule.rate(step, 0) for step in range(16)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[15] == pytest.approx(0.4)


def test_the_gate_weighs_by_its_temperature() -> None:
    torch.manual_seed(0)
    tokens = torch.randn(6, 8)
    found = {}
    for temperature in (0.1, 1.0, 10.0):
        gate = registry.get("moe_gate", "temperature")(8, 4, k=2, temperature=temperature)
        with torch.no_grad():
            gate.weight.copy_(torch.linspace(-1, 1, 32).view(4, 8))
        found[temperature] = gate(tokens)
    assert torch.equal(found[0.1].experts, found[10.0].experts)
    assert found[0.1].weights.max(-1).values.mean() > found[10.0].weights.max(-1).values.mean()
    experts = GroupedExperts(4, 8, 16)
    assert MixtureOfExperts(gate, experts)(tokens).output.shape == tokens.shape


def test_the_compressor_loses_nothing_over_time() -> None:
    def mean(rank: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        torch.manual_seed(rank)
        comm = Communicator(torch.distributed.group.WORLD)
        reducer = registry.build("compressor", "half", {}).reducer(comm, 4096)
        given, arrived = torch.zeros(4096), torch.zeros(4096)
        for _ in range(50):
            x, out = torch.randn(4096), torch.empty(4096)
            given += x
            reducer.start(x, out).wait()
            reducer.commit()
            arrived += out
        return given, arrived, reducer.sent_bytes()

    results = sim.run(2, mean)
    exact = (results[0][0] + results[1][0]) / 2
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][1] - exact).abs().max() < 0.05
    assert results[0][2] <= 2 * 4096 + 64  # of 4 · 4096 in fp32


def test_an_engine_trains_with_all_that_its_configuration_names() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SignMomentum", "params": {"lr": 0.01}},
        "scheduler": {"type": "InverseSqrt", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 3},
    }

    class Model(torch.nn.Sequential):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.mse_loss(super().forward(x), y)

    def train(rank: int) -> list[float]:
        torch.manual_seed(0)
        engine, *_ = initialize(config, Model(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
        x = torch.ones(4, 8) * (rank + 1)
        return [float(engine.train_batch(iter([(x, x[:, :1])]))) for _ in range(20)]

    losses = sim.run(2, train)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2
