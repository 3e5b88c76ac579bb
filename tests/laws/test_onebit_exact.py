"""Optimizers that compress compute what one process does, where nothing is left out, or a parameter has two names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from tests.laws import test_three_axes as three_axes
from tests.laws.test_families import states, whole
from tests.laws.test_onebit_axes import DILOCO, GROUP, GROUPS, LOCAL, WAYS, ZERO_ONE, values
from tests.profiles import deep_example, examples
from torch import nn

from zoo import sim
from zoo.comm.compression import Codec
from zoo.optim import OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.zero import ZeroOptimizer


class Exact(Codec):
    """Nothing is left out: so that steps that "compress" compute what one process does."""

    name = "exact"

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode_(self, c: torch.Tensor, error: torch.Tensor | None, wire: torch.Tensor) -> None:
        if error is not None:
            c.add_(error)
        wire.view(torch.float32).copy_(c)

    def decode_(self, out: torch.Tensor, wire: torch.Tensor, *, add: bool = False) -> None:
        value = wire.view(torch.float32)
        out.add_(value) if add else out.copy_(value)


EXACT = {"compressor": Exact(), "betas": (0.8, 0.95), "eps": 1e-2, "lr": 0.05}
SAME = {
    "Adam": EXACT | {"optimizer": OnebitAdam, "freeze_step": 2, "weight_decay": 0.1},
    "Lamb": EXACT | {"optimizer": OnebitLamb, "freeze_step": 2, "coeff_beta": 0.5, "weight_decay": 0.1},
    "ZeroOne": EXACT | {
        "optimizer": ZeroOneAdam, "var_freeze_step": 3, "var_update_scaler": 1, "local_step_clipper": 1,
    },
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.matrix
@pytest.mark.parametrize("way", SAME.values(), ids=SAME)
@examples(times=0.5, quick=0.34)
@given(case=three_axes.cases())
@example(case=three_axes.Case(stage=0, tied=(0, 3), data=1, tensor=2, pair_at=1))
@deep_example(case=three_axes.Case(stage=0, data=1, num_micro=2, tied=(0, 1, 3)))
@example(case=three_axes.Case(stage=0, data=1, num_micro=1, tied=(0, 1, 3), tied_parts=True, pair_at=1))
def test_what_is_brought_together_exactly_is_what_one_process_computes(
    way: dict[str, Any], case: three_axes.Case
) -> None:
    """Models with experts, matrices that are cut, tied layers, in stages of a pipeline: all of it in one."""
    case, steps = replace(case, clip_norm=0.0), 5

    def fn(rank: int) -> Any:
        pipeline = three_axes.Pipeline(case, rank, torch.float32, **way)
        for step in range(steps):
            pipeline.step(step)
        return states(pipeline.optimizer)

    expected = alone(way, case, steps)
    others = [alone(way, case, steps, noise=seed) for seed in (1, 2, 3)]
    got = whole(sim.run(case.world, fn, seed=case.seed))
    for name, value in expected.items():
        # What rounding may do is what it does to one process: layers that are tied three times make some cases
        # a hundred times as sensitive as others.
        moved = max(float((other[name] - value).abs().max()) for other in others)
        torch.testing.assert_close(
            got[name, "parameter"], value, rtol=1e-3, atol=1e-4 + 8 * moved, msg=lambda m, n=name: f"{n}: {m}"
        )


def alone(way: dict[str, Any], case: three_axes.Case, steps: int, noise: int = 0) -> dict[str, torch.Tensor]:
    """The parameters of one process after ``steps``; with ``noise``, of first values that are rounded another way."""
    model = three_axes.Layers(case, 0, three_axes.NUM_LAYERS, None).float()
    generator = torch.Generator().manual_seed(noise)
    for value in model.parameters() if noise else ():
        value.data.mul_(1 + 2.0**-23 * torch.randn(value.shape, generator=generator))
    optimizer = way["optimizer"](model.parameters(), **{k: v for k, v in way.items() if k != "optimizer"})
    for step in range(steps):
        for replica in range(case.replicas):
            for micro in range(case.num_micro):
                out = model(three_axes.tokens(case, replica, micro, step).float())
                (three_axes.loss_of(case, out) / case.replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


class Twice(nn.Module):
    """A parameter with two names, used in two places of one rank."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.first.weight.data = torch.from_numpy(values("twice", size=25)).view(5, 5)
        self.shared = shared
        if shared:
            self.second.weight = self.first.weight
        else:
            del self.second

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.shared:
            return (self.first(x) + self.second(y)).sum()
        return self.first(torch.cat([x, y])).sum()


@pytest.mark.matrix
@pytest.mark.parametrize("placement", [{"stage": 0}, {"stage": 2}, GROUPS[2]], ids=str)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_parameter_that_is_tied_on_one_rank_is_one(way: dict[str, Any], placement: dict[str, Any]) -> None:
    if placement == {"stage": 2} and way in (ZERO_ONE, DILOCO, LOCAL):
        return  # refused there

    def fn(rank: int, shared: bool) -> torch.Tensor:
        model = Twice(shared)
        given = {"param_persistence_threshold": 0, "compressor": GROUP, **way, **placement}
        optimizer = ZeroOptimizer(model, **given)
        for step in range(6):
            x, y = torch.from_numpy(values("xy", rank, step, size=40)).view(2, 4, 5)
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()["first.weight"]

    for tied, plain in zip(*(sim.run(4, lambda r, s=s: fn(r, s)) for s in (True, False)), strict=True):
        torch.testing.assert_close(tied, plain, rtol=1e-3, atol=1e-5)
