"""Compilers see one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.moe.battery import GATES, Made

from zoo import sim
from zoo.comm import Communicator
from zoo.moe import Capacity, GroupedExperts, MixtureOfExperts, exchange

WIDTH = 8


@pytest.mark.slow
@pytest.mark.parametrize("made", GATES, ids=lambda made: made.name)
def test_a_layer_is_one_graph(made: Made) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    layer = MixtureOfExperts(
        made.make(WIDTH, 4, made.max_k or 2), GroupedExperts(4, WIDTH, 16, activation="silu", gated=True),
        capacity=Capacity(factor=0.5) if "top" in made.name else None, shared=torch.nn.Linear(WIDTH, WIDTH),
    )  # fmt: skip
    layer.gate.noise_key = torch.tensor(5)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for step, tokens in enumerate((12, 12, 20)):
        x = torch.randn(tokens, WIDTH, requires_grad=True)
        layer.gate.noise_key.fill_(step)  # no reason to compile again
        results = []
        for run in (layer, compiled):
            found = run(x)
            loss = found.output.square().sum() + found.balance + found.z_loss
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()], allow_unused=True, materialize_grads=True)
            results.append([found.output, found.demand, *gradients])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 + 1  # static, then any number of tokens


@pytest.mark.slow
def test_an_exchange_is_one_graph() -> None:
    """Sizes that the data decide are unbacked, forward and backward."""
    torch._dynamo.reset()
    exchanged: list[torch.Tensor] = []

    def fn(rank: int) -> None:
        comm = Communicator()
        number = exchange.known_as(comm)

        def there_and_back(x: torch.Tensor, counts: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            come, splits = exchange.exchange_counts(counts, number)
            ticket = exchange.start(x, splits[0], comm=number)
            y = torch.tanh(exchange.finish(ticket, x, splits[0], comm=number) @ w) * come.sum()
            ticket = exchange.start(y, splits[0], comm=number, back=True)
            return exchange.finish(ticket, y, splits[0], comm=number, back=True, num_rows=x.shape[0])

        compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
        w = torch.randn(WIDTH, WIDTH, requires_grad=True)
        for counts in ([3, 2], [0, 4], [1, 0]):
            x = torch.randn(6, WIDTH, requires_grad=True)
            found = [run(x, torch.tensor(counts), w) for run in (there_and_back, compiled)]
            torch.testing.assert_close(*found)
            assert not found[1][sum(counts) :].any()
            gradients = [torch.autograd.grad(y.sin().sum(), [x, w]) for y in found]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b)
            exchanged.append(x)

    sim.run(1, fn)
    assert len(exchanged) == 3
