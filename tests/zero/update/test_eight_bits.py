"""States in 8 bits, of bitsandbytes: blocks are those of a parameter, or of the part that a rank has of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from zoo import sim
from zoo.zero import ZeroOptimizer

RANKS, STEPS, LR = 2, 6, 1e-2
EVEN, ODD = (64, 128, 64), (50, 131, 61)


@pytest.fixture(autouse=True)
def _needs_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes", exc_type=ImportError)  # for seconds: not where tests are collected


def net(sizes: tuple[int, int, int], bias: bool) -> nn.Module:
    torch.manual_seed(0)
    first, middle, last = sizes
    return nn.Sequential(nn.Linear(first, middle, bias), nn.Tanh(), nn.Linear(middle, last, bias))


def trained(
    rank: int, stage: int, name: str, sizes: tuple[int, int, int], *, bias: bool, **options: Any
) -> dict[str, torch.Tensor]:
    """The parameters after some steps, every rank on data of its own."""
    import bitsandbytes

    model = net(sizes, bias)
    optimizer = ZeroOptimizer(model, stage=stage, optimizer=getattr(bitsandbytes.optim, name), lr=LR, **options)
    dice = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        x = torch.randn(8, sizes[0], generator=dice)
        optimizer.backward((model(x) - x[:, :1].sin()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in optimizer.consolidated_parameters().items()}


def at(stage: int, name: str, sizes: tuple[int, int, int], *, bias: bool) -> dict[str, torch.Tensor]:
    both = sim.run(RANKS, lambda rank: trained(rank, stage, name, sizes, bias=bias))
    assert all(torch.equal(value, both[1][key]) for key, value in both[0].items())
    return both[0]


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_whole_blocks_have_the_bits_of_whole_parameters(stage: int, name: str) -> None:
    """Ranks have a matrix each, or at stage 3 halves, which 256 divides."""
    whole, split = at(0, name, EVEN, bias=False), at(stage, name, EVEN, bias=False)
    assert all(torch.equal(value, whole[key]) for key, value in split.items())
    plain = at(0, name.replace("8bit", ""), EVEN, bias=False)
    assert not all(torch.equal(value, plain[key]) for key, value in whole.items()), "nothing was quantised"


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_blocks_never_mix_parameters(stage: int) -> None:
    """Nothing loses much more than where parameters are whole; biases, whose states are small, nearly nothing."""
    whole, split = at(0, "AdamW8bit", ODD, bias=True), at(stage, "AdamW8bit", ODD, bias=True)
    exact = at(0, "AdamW", ODD, bias=True)
    for key, value in split.items():
        lost = (whole[key] - exact[key]).norm()
        assert (value - exact[key]).norm() <= 1.5 * lost + 1e-3, key


@pytest.mark.parametrize(("stage", "ranks", "told"), [(0, 2, False), (2, 1, False), (1, 2, True), (3, 2, True)])
def test_who_cuts_blocks_is_told_once(stage: int, ranks: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="zoo.zero"):
        sim.run(ranks, lambda rank: trained(rank, stage, "AdamW8bit", ODD, bias=True))
    said = [record.getMessage() for record in caplog.records if "AdamW8bit" in record.getMessage()]
    assert len(said) == told
    if told:
        assert "quantises states in blocks" in said[0]
        assert "0.weight" in said[0] or "2.weight" in said[0]
