"""Memory comes back when a model and its optimizer are dropped, whatever was done with them before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import ShardedModel, ZeroConfig, ZeroOptimizer


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 1))


def x() -> torch.Tensor:
    return torch.randn(4, 8)


def trained(stage: int) -> list[object]:
    built = model()
    optimizer = ZeroOptimizer(built, stage=stage, optimizer=torch.optim.Adam, lr=0.1)
    for _ in range(3):
        built(x()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [built, optimizer, optimizer.sharded]


def backward_last(stage: int) -> list[object]:
    built = model()
    optimizer = ZeroOptimizer(built, stage=stage, optimizer=torch.optim.Adam, lr=0.1)
    with optimizer.no_sync():
        built(x()).sum().backward()
    return [built, optimizer]


def forward_last(stage: int) -> list[object]:
    built = model()
    optimizer = ZeroOptimizer(built, stage=stage, optimizer=torch.optim.Adam, lr=0.1)
    loss = built(x()).sum()
    return [built, optimizer, loss.detach_()]


def failed_backward(stage: int) -> list[object]:
    built = model()
    optimizer = ZeroOptimizer(built, stage=stage, optimizer=torch.optim.Adam, lr=0.1)

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    hidden = built[1](built[0](x()))  # type: ignore[index]
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        built[3](built[2](hidden)).sum().backward()  # type: ignore[index]
    return [built, optimizer]


def driven(stage: int) -> list[object]:
    built = model()
    optimizer = ZeroOptimizer(built, stage=stage, optimizer=torch.optim.Adam, lr=0.1)
    with optimizer.sharded.window() as window:
        with window.forward(0):
            loss = built(x()).sum()
        with window.backward(0):
            loss.backward()
    optimizer.step()
    return [built, optimizer, window]


def kept_by_its_model(stage: int) -> list[object]:
    built, optimizer, *_ = trained(stage)
    built.optimizer = optimizer  # type: ignore[attr-defined]
    return [built, optimizer]


def forward_alone(stage: int) -> list[object]:
    built = model()
    sharded = ShardedModel(built, config=ZeroConfig(stage=3), trains=False)
    built(x())
    return [built, sharded]


USES = [trained, backward_last, forward_last, failed_backward, driven, kept_by_its_model, forward_alone]


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_dropped_is_freed(stage: int) -> None:
    def on_rank(rank: int) -> list[tuple[str, weakref.ref[object]]]:
        return [(use.__name__, weakref.ref(thing)) for use in USES for thing in use(stage)]

    kept = [ref for refs in sim.run(2, on_rank) for ref in refs]
    gc.collect()
    assert [(name, ref()) for name, ref in kept if ref() is not None] == []
