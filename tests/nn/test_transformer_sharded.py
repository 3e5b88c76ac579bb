"""Transformer layers under ZeRO, with and without activation checkpointing: what plain torch trains in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.transformers_in_torch import OPTIONS, make
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.activation_checkpointing import ActivationCheckpointing
from zoo.nn import TransformerLayer, TransformerLayerConfig
from zoo.zero import Init, ZeroOptimizer

LAYERS, RATE, STEPS = 3, 0.1, 3


class Stack(nn.Module):
    def __init__(self, again: bool, **fields: object) -> None:
        super().__init__()
        dropout = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.3}
        self.layers = nn.ModuleList(make(torch.float64, k, **{**dropout, **fields}) for k in range(LAYERS))
        self.checkpoint = ActivationCheckpointing() if again else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.checkpoint is None else self.checkpoint(layer, x)
        return x.square().mean()


def data(rank: int, step: int) -> torch.Tensor:
    """Of the rank, and the seed of its dropout."""
    torch.manual_seed(100 * step + rank)
    return torch.randn(2, 5, 12, dtype=torch.float64)


@pytest.mark.dear
@examples(times=2, quick=1)
@given(
    world=st.integers(1, 3), stage=st.integers(0, 3), pre=st.booleans(), options=st.sets(st.sampled_from(OPTIONS)),
    again=st.booleans(), bucket_size=st.sampled_from([1, 200, 10**6]),
)  # fmt: skip
def test_training_at_every_stage(
    world: int, stage: int, pre: bool, options: set[str], again: bool, bucket_size: int
) -> None:
    """The sums over ranks are in another order: fp64 to 1e-10."""
    fields = {"pre_layer_norm": pre, **dict.fromkeys(options, True)}

    def fn(rank: int) -> list[float]:
        model = Stack(again, **fields)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, param_persistence_threshold=0,
            reduce_bucket_size=bucket_size, max_live_parameters=0,
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            loss = model(data(rank, step))
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    model = Stack(False, **fields)
    plain = torch.optim.SGD(model.parameters(), RATE)
    expected: list[list[float]] = []
    for step in range(STEPS):
        plain.zero_grad()
        losses = []
        for rank in range(world):
            loss = model(data(rank, step))
            (loss / world).backward()
            losses.append(float(loss.detach()))
        plain.step()
        expected.append(losses)
    for rank, losses in enumerate(sim.run(world, fn)):
        assert losses == pytest.approx([step[rank] for step in expected], rel=1e-10)


def test_layers_are_made_in_parts() -> None:
    """Under Init each rank keeps its part of a layer, whose initial values are those of rank 0."""

    def fn(rank: int) -> float:
        torch.manual_seed(0)
        with Init():
            layer = TransformerLayer(TransformerLayerConfig(hidden_size=12, heads=3))
        optimizer = ZeroOptimizer(layer, stage=3, optimizer=torch.optim.SGD, lr=RATE, param_persistence_threshold=0)
        torch.manual_seed(rank)
        loss = layer(torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        layer.eval()
        with torch.no_grad():
            return float(layer(torch.ones(1, 4, 12)).double().sum())

    found = sim.run(2, fn)
    assert found[0] == found[1]
