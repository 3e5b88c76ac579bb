"""What a window keeps whole, and of what it gives up a part that backward can use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import Stage3Optimizer, ZeroOptimizer

WIDTH, NUM_LAYERS = 8, 4
LAYER_BYTES = WIDTH * WIDTH * 4


class Layers(nn.Module):
    """Linear layers, and one that the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        self.probe = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def build(**options: Any) -> tuple[Layers, ZeroOptimizer]:
    model = Layers()
    return model, Stage3Optimizer(
        model, optimizer=torch.optim.SGD, lr=0.1, units=[nn.Linear], param_persistence_threshold=0,
        reduce_bucket_size=1, prefetch_bucket_size=0, max_live_parameters=0, **options,
    )  # fmt: skip


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_what_makes_room_is_gathered_within_its_node_again(layers: int) -> None:
    """With hpZ backward brings nothing from other nodes, whatever the window had to give up for the next layer."""

    def fn(rank: int) -> tuple[int, int]:
        model, optimizer = build(ranks_per_node=2, zero_hpz_partition_size=2)
        log = optimizer.comm.log
        log.reset()
        with optimizer.sharded.window(max_bytes=layers * LAYER_BYTES) as window:
            with window.forward(0):
                loss = model(torch.ones(1, WIDTH)).sum()
            between = log.ops["all_gather"].inter_bytes
            within = log.ops["all_gather"].intra_bytes
            with window.backward(0):
                loss.backward()
            assert log.ops["all_gather"].inter_bytes == between == NUM_LAYERS * LAYER_BYTES // 2
            gathered = log.ops["all_gather"].intra_bytes - within
        # Each half of a node's copy that was given up comes from the neighbour.
        assert gathered == (NUM_LAYERS - layers) * LAYER_BYTES // 2 or layers == 0
        return gathered, optimizer.memory()["parameters"]

    rank_0, *others = sim.run(4, fn)
    assert others == [rank_0] * 3
    assert rank_0[1] == (NUM_LAYERS + 1) * LAYER_BYTES // 4  # nothing but shards is left


def test_what_a_backward_uses_beside_its_forward_is_given_back() -> None:
    """A hook that runs another layer of the model, to look at a gradient through it."""

    def fn(rank: int) -> None:
        model, optimizer = build()
        at_rest, seen = optimizer.memory()["parameters"], []

        def look(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                seen.append(model.probe(gradient))

        with optimizer.sharded.window() as window:
            with window.forward(0):
                out = model(torch.ones(1, WIDTH))
                out.register_hook(look)
            with window.backward(0):
                out.sum().backward()
            assert len(seen) == 1
            assert optimizer.memory()["parameters"] == at_rest

    sim.run(2, fn)
