"""The report's figures are those of the models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from zoo.compression.packed import pack_model
from zoo.compression.post_training import Recipe, Uniform, quantise
from zoo.compression.report import report


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8, bias=False))


def test_a_packed_model() -> None:
    before, after = model(), model()
    pack_model(after, quantise(after, Recipe(grid=Uniform(bits=4), group_size=16)))
    x, y = torch.randn(10, 32), torch.randn(10, 8)
    found = report(before, after, inputs=x, measure=lambda m: float((m(x) - y).square().mean()), unit="error")
    first, second = found.layers["0"]
    assert first is not None
    assert second is not None
    assert (first.kind, first.shape, first.numel, first.bits, first.num_bytes) == ("Linear", (48, 32), 1584, 32.0, 6336)
    assert (second.kind, second.shape, second.numel) == ("PackedLinear", (48, 32), 1584)
    assert second.bits == 4 + 32 / 16
    assert second.num_bytes == 48 * 32 // 2 + 4 * 48 * 2 + 4 * 48
    assert first.flops == second.flops == 2 * 10 * 48 * 32
    assert found.totals()[1]["flops"] == 2 * 10 * (48 * 32 + 48 * 8)
    assert found.measured is not None
    assert found.measured[0] == pytest.approx(float((before(x) - y).square().mean().detach()))
    assert found.measured[1] != found.measured[0]
    assert "Linear > PackedLinear" in found.table()
    assert "error: " in found.table()
    assert json.loads(json.dumps(found.to_dict()))["layers"]["0"][1]["bits"] == 6.0


def test_a_pruned_and_a_smaller_model(tmp_path: Path) -> None:
    before, after = model(), model()
    with torch.no_grad():
        after[2].weight.mul_(torch.arange(48) % 4 == 0)
    after[0] = nn.Linear(32, 24)
    del after[1]
    found = report(before, after)
    first, second = found.layers["1"]
    assert first is None  # the layer after the deleted one has its name now
    assert second is not None
    assert second.nonzero == 0.25
    assert second.flops is None
    assert found.layers["2"][1] is None
    assert found.totals()[0]["numel"] == 48 * 33 + 48 * 8
    assert found.totals()[1]["numel"] == 24 * 33 + 48 * 8
    found.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 5_000


def test_levels_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(6, 16), nn.Linear(16, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(x))

    first = Tied().train()
    second = copy.deepcopy(first)
    with torch.no_grad():
        second.embed.weight.sign_()
    found = report(first, second, inputs=(torch.zeros(1, 3, dtype=torch.long),))
    assert list(found.layers) == ["embed"]
    assert found.layers["embed"][1].levels == 2  # type: ignore[union-attr]
    assert found.totals()[0]["num_bytes"] == 6 * 16 * 4
    assert first.training


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_modes_of_parts_stay_and_layers_without_rows_and_arguments_by_name_count() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(32), nn.Linear(32, 16)
            self.empty = nn.Linear(32, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(input=self.norm(x)) if self.plain else self.last(x=self.norm(x))
            return torch.cat([out, self.empty(x)], -1)

        plain = True

    before, after = Named(), Named()
    after.plain = False
    pack_model(after, quantise(after, Recipe(grid=Uniform(bits=4), group_size=16)))
    for each in (before, after):
        each.norm.eval()
    found = report(before, after, inputs=torch.randn(10, 32))
    assert [m.training for m in (before, before.norm, before.last)] == [True, False, True]
    first, second = found.layers["last"]
    assert first is not None
    assert second is not None
    assert first.flops == second.flops == 2 * 10 * 32 * 16
    assert found.layers["empty"][1] is not None


def test_operations_count_once_whatever_modules_are_around_them() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = nn.Parameter(torch.ones(16)), nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.fc(x * self.scale)
            return out

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.inner = nn.Parameter(torch.zeros(5, 16)), Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x + self.position)
            return self.inner.fc(out) @ self.position.T  # fc is called from outside of its parent too

    found = report(Outer(), Outer(), inputs=torch.randn(5, 16))
    layers = {name: pair[0].flops for name, pair in found.layers.items() if pair[0] is not None}
    assert layers == {"(model)": 2 * 5 * 16 * 5, "inner": 0, "inner.fc": 2 * (2 * 5 * 16 * 16)}
    assert found.totals()[0]["flops"] == sum(layers.values())  # type: ignore[arg-type]
    alone = report(nn.Linear(16, 8), nn.Linear(16, 8), inputs=torch.randn(5, 16))
    assert alone.totals()[0]["flops"] == 2 * 5 * 16 * 8
