"""A small model of four units under ZeRO, and plain torch beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zoo import sim
from zoo.zero import ZeroOptimizer

STAGES = range(4)
RATE = 0.1


class Blocks(nn.Module):
    """Four units; each rank may leave the first block out of its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        out: torch.Tensor = self.last(x)
        return out


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def build(stage: int, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = (model if model is not None else Blocks()).double()
    given = {
        "optimizer": torch.optim.SGD, "lr": RATE, "param_persistence_threshold": 0, "reduce_bucket_size": 1,
        "max_live_parameters": 0, **options,
    }  # fmt: skip
    return model, ZeroOptimizer(model, stage=stage, **given)


def twin(world: int, steps: int = 1, make: Callable[[], nn.Module] = Blocks, **options: Any) -> dict[str, torch.Tensor]:
    """Plain torch in one process on the data of all ranks."""
    model = make().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, **options)
    for step in range(steps):
        for rank in range(world):
            (model(data(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def one_step(model: nn.Module, optimizer: ZeroOptimizer, rank: int, step: int = 0) -> None:
    optimizer.backward(model(data(rank, step)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def check(optimizer: ZeroOptimizer, expected: dict[str, torch.Tensor]) -> None:
    for name, value in optimizer.consolidated_parameters().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def check_update(stage: int, run: Callable[[nn.Module, int, int], None]) -> None:
    """One update after ``run(model, rank, divisor of its losses)`` on two ranks equals that of plain torch."""

    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        run(model, rank, 1)
        optimizer.step()
        check(optimizer, expected)

    plain = Blocks().double()
    for rank in range(2):
        run(plain, rank, 2)
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)
