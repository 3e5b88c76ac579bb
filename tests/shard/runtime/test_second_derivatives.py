"""Gradients of gradients towards inputs: penalties, forces, products with a Hessian; plain torch's numbers, on ranks
with other data each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.engine import initialize
from zoo.zero import ZeroOptimizer

WORLD, RATE = 2, 0.1
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """A critic; a table that only some losses reach, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.idle = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
        out: torch.Tensor = self.last(h)
        return out


class Energy(Net):
    """Returns an energy and its forces, which it makes in its own forward."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        energy = super().forward(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, forces


class Flat(Net):
    """Linear: nothing of a penalty comes through an output of a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.twice(self.first(x)))
        return out


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


def with_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + 0.5 * slope(model, x + 1) - model(x - 1).mean()


def forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    energy, found = model(x)
    return (energy - 1).square().mean() + (found - x).square().mean()


def forces_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x)[1] - x).square().mean()


def curvature(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """gᵀg with g by the parameters, so that its gradient is 2 H g."""
    loss = model(x).square().mean()
    used = [p for name, p in model.named_parameters() if "idle" not in name]
    found = torch.autograd.grad(loss, used, create_graph=True)
    return loss + torch.stack([g.square().sum() for g in found]).sum()


def third(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A Laplacian: the second derivative by inputs, and its gradient."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    return h.square().mean()


CASES: list[tuple[type[Net], Loss]] = [
    (Net, slope), (Flat, slope), (Net, with_loss), (Flat, with_loss), (Energy, forces), (Energy, forces_alone),
    (Net, curvature), (Net, third),
]  # fmt: skip


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def twin(cls: type[Net], loss: Loss, steps: int, world: int, per_step: int = 1) -> dict[str, torch.Tensor]:
    model = cls().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(steps):
        for rank in range(world):
            for k in range(per_step):
                (loss(model, data(rank, step * per_step + k)) / (world * per_step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def check(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("cls", "loss"), CASES)
def test_a_backward_through_gradients_of_inputs_is_torchs(
    stage: int, world: int, overlap: bool, cls: type[Net], loss: Loss
) -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        model = cls().double()
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, reduce_bucket_size=1, overlap_comm=overlap
        )
        for step in range(3):
            loss(model, data(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    for found in sim.run(world, job):
        check(found, twin(cls, loss, 3, world))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("cls", "loss"), [(Net, slope), (Flat, with_loss), (Energy, forces)])
def test_under_an_engine_with_micro_batches(stage: int, own: bool, cls: type[Net], loss: Loss) -> None:
    """``engine.backward`` and ``loss.backward()``: what arrives is divided by G in both."""

    def job(rank: int) -> dict[str, torch.Tensor]:
        config = {
            "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": RATE}}, "zero_optimization": {"stage": stage},
        }  # fmt: skip
        engine = initialize(config, cls().double())[0]
        for step in range(4):
            found = loss(engine, data(rank, step))  # type: ignore[arg-type]
            engine.backward(found) if own else found.backward()  # type: ignore[no-untyped-call]
            engine.step()
        return engine.optimizer.consolidated_parameters()

    for found in sim.run(WORLD, job):
        check(found, twin(cls, loss, 2, WORLD, 2))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_penalty_every_other_step_and_a_gradient_without_one(stage: int) -> None:
    """Lazy regularisation; between them gradients of parameters are asked for, which change nothing."""

    def train(model: nn.Module, step: int, x: torch.Tensor) -> torch.Tensor:
        return with_loss(model, x) if step % 2 == 0 else model(x).square().mean()

    def job(rank: int) -> dict[str, torch.Tensor]:
        model = Net().double()
        optimizer = ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, reduce_bucket_size=1)
        for step in range(4):
            torch.autograd.grad(model(data(rank, step)).sum(), [model.last.weight])
            train(model, step, data(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        assert not any(p._backward_hooks for p in model.parameters())
        return {name: p.detach() for name, p in model.named_parameters()}

    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(4):
        for rank in range(WORLD):
            (train(model, step, data(rank, step)) / WORLD).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in sim.run(WORLD, job):
        check(found, {name: p.detach() for name, p in model.named_parameters()})


def test_at_stage_3_it_is_refused_with_the_reason_and_the_next_step_is_right() -> None:
    def job(rank: int) -> dict[str, torch.Tensor]:
        model = Net().double()
        optimizer = ZeroOptimizer(
            model, stage=3, optimizer=torch.optim.SGD, lr=RATE, param_persistence_threshold=0, reduce_bucket_size=1
        )
        with pytest.raises(NotImplementedError, match=r"at ZeRO stage 3.*Stages 0 to 2"):
            slope(model, data(rank, 0))
        optimizer.zero_grad()
        model(data(rank, 0)).square().mean().backward()
        optimizer.step()
        return optimizer.consolidated_parameters()

    for found in sim.run(WORLD, job):
        check(found, twin(Net, lambda model, x: model(x).square().mean(), 1, WORLD))


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_with_a_graph_are_not_added_to_parameters(stage: int) -> None:
    model = Net().double()
    ZeroOptimizer(model, stage=stage, optimizer=torch.optim.SGD, lr=RATE)
    with pytest.raises(NotImplementedError, match=r"backward\(create_graph=True\).*autograd\.grad\(outputs, inputs"):
        model(data(0, 0)).sum().backward(create_graph=True)
