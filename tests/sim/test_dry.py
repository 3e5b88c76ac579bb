"""Dry runs: what is computed in them, and what only has memory. tests/laws/test_peak.py has whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo import sim

LARGE = 1 << 14  # numbers


def test_small_tensors_are_computed_and_large_ones_only_allocated() -> None:
    with sim.dry():
        small = torch.arange(4.0) * 2
        large = torch.ones(LARGE)
        before = large.clone()
        large.mul_(3)
        assert large.add_(1) is large
        assert large.view(2, -1).shape == (2, LARGE // 2)
        product = torch.empty(256, 256) @ torch.empty(256, 128)
        count = torch.zeros(LARGE, dtype=torch.int64)
    assert small.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert (before.shape, product.shape, product.dtype) == ((LARGE,), (256, 128), torch.float32)
    assert int(count.sum()) == 0
    assert not torch.equal(large, torch.full((LARGE,), 4.0))


def test_the_pages_of_large_tensors_stay_untouched() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    with sim.dry():
        x = torch.empty(1 << 28)  # 1 GiB
        y = (x * 2 + 1).exp()
        y.add_(x)
    assert resident() - before < 1 << 28
    assert y.shape == x.shape


def test_the_generator_and_the_program_are_as_without() -> None:
    torch.manual_seed(3)
    with sim.dry():
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
        out = model(torch.randn(64, 256)).square().mean()
        out.backward()
        weight = model[0].weight
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert torch.isfinite(out)
    with pytest.raises(ValueError, match="boom"), sim.dry():
        raise ValueError("boom")
    assert torch.equal(torch.ones(LARGE) * 2, torch.full((LARGE,), 2.0))  # computed again


def test_the_largest_are_dealt_evenly() -> None:
    with sim.dry():
        scores = torch.empty(1 << 14, 8)
        places = scores.topk(1, dim=-1).indices
    assert torch.bincount(places.flatten(), minlength=8).tolist() == [1 << 11] * 8


def test_operations_without_shapes_on_meta_run() -> None:
    with sim.dry():
        x = torch.zeros(LARGE)
        assert x.nonzero().shape == (0, 1)
        assert x[x > 1].numel() in (0, LARGE)
