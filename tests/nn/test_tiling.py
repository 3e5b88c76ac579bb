"""TiledLinear: the layer it stands for, at every stage, and the memory it saves at stage 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.nn import TiledLinear, UnitList
from zoo.shard.placement.units import find_units
from zoo.zero import Init, Stage3Optimizer, ZeroOptimizer


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return out


def build(tiled: bool, width: int, in_splits: int, out_splits: int, bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    whole = [nn.Linear(width, width, bias=bias) for _ in range(2)]
    copies = iter(copy.deepcopy(whole))
    if tiled:
        copies = iter(TiledLinear(width, width, bias, in_splits, out_splits, init_linear=layer) for layer in copies)
    return nn.Sequential(*[Block(lambda: next(copies), width) for _ in range(2)]).double()


def data(rank: int, step: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 3, width, generator=generator, dtype=torch.float64)


def reassemble(parameters: dict[str, torch.Tensor], prefix: str, rows: int, columns: int) -> torch.Tensor:
    grid = [[parameters[f"{prefix}.tiles.{i * columns + j}.weight"] for j in range(columns)] for i in range(rows)]
    return torch.cat([torch.cat(row, dim=1) for row in grid], dim=0)


@given(
    world=st.integers(1, 4),
    stage=st.integers(0, 3),
    width=st.sampled_from([1, 5, 8, 13]),
    splits=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
    bucket_size=st.sampled_from([1, 40, 10**6]),
    threshold=st.sampled_from([0, 10]),
)
def test_training_it_equals_training_the_layer_at_every_stage(
    world: int, stage: int, width: int, splits: tuple[int, int], bias: bool, bucket_size: int, threshold: int
) -> None:
    in_splits, out_splits = (min(split, width) for split in splits)

    def fn(rank: int, tiled: bool) -> dict[str, torch.Tensor]:
        model = build(tiled, width, in_splits, out_splits, bias)
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=0.1, momentum=0.9, clip_norm=1.0,
            reduce_bucket_size=bucket_size, param_persistence_threshold=threshold, max_live_parameters=0,
        )  # fmt: skip
        for step in range(2):
            model(data(rank, step, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.consolidated_parameters()

    expected = sim.run(world, lambda rank: fn(rank, False))[0]
    for got in sim.run(world, lambda rank: fn(rank, True)):
        for block in ("0", "1"):
            weight = reassemble(got, f"{block}.linear", out_splits, in_splits)
            torch.testing.assert_close(weight, expected[f"{block}.linear.weight"], rtol=1e-12, atol=1e-12)
            if bias:
                parts = [got[f"{block}.linear.tiles.{i * in_splits}.bias"] for i in range(out_splits)]
                torch.testing.assert_close(torch.cat(parts), expected[f"{block}.linear.bias"], rtol=1e-12, atol=1e-12)


class Probe(torch.autograd.Function):
    """The identity; its backward runs at the end of the tile's, when all the tile needs is there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, measure: Callable[[], None]) -> torch.Tensor:
        ctx.measure = measure
        measure()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.measure()
        return grad, None


class Measured(nn.Linear):
    measure: Callable[[], None] = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Probe.apply(x, type(self).measure))


@pytest.mark.matrix
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("prefetch", [0, None])
def test_gathered_memory_is_that_of_a_tile(inside: bool, prefetch: int | None) -> None:
    width, tiles, world = 64, 8, 2

    def fn(rank: int, out_splits: int) -> int:
        class Here(Measured):
            pass

        def make() -> nn.Module:
            return TiledLinear(width, width, out_splits=out_splits, linear_cls=Here)

        model = nn.Sequential(*[Block(make, width) for _ in range(2)]) if inside else nn.Sequential(make(), make())
        optimizer = Stage3Optimizer(
            model, lr=0.1, param_persistence_threshold=width, reduce_bucket_size=1, max_live_parameters=0,
            prefetch_bucket_size=prefetch,
        )  # fmt: skip
        resting, peaks = optimizer.memory()["parameters"], []
        Here.measure = staticmethod(lambda: peaks.append(optimizer.memory()["parameters"] - resting))
        for _ in range(2):
            model(data(rank, 0, width).float().requires_grad_()).sum().backward()
        assert len(peaks) == 2 * 2 * 2 * out_splits
        assert optimizer.memory()["parameters"] == resting
        return max(peaks)

    whole, tiled = (sim.run(world, lambda rank, n=n: fn(rank, n))[0] for n in (1, tiles))
    layer = width * width * 4
    assert whole == (layer if prefetch == 0 else 2 * layer)
    assert tiled == whole // tiles


def test_every_tile_is_a_unit_wherever_the_layer_stands() -> None:
    def make() -> TiledLinear:
        return TiledLinear(6, 6, in_splits=2, out_splits=3)

    nested = nn.Sequential(*[Block(make, 6) for _ in range(2)])
    for choice in (None, [Block], [nn.LayerNorm], lambda name, module: name == "0"):
        names = {unit.name for unit in find_units(nested, choice)}
        assert {f"{block}.linear.tiles.{tile}" for block in range(2) for tile in range(6)} <= names
    alone = TiledLinear(6, 6)
    assert [unit.name for unit in find_units(alone)] == ["", "tiles.0"]
    listed = UnitList([nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)])
    assert [unit.name for unit in find_units(nn.Sequential(listed))] == ["", "0.0", "0.2"]


@given(
    features=st.tuples(st.integers(1, 12), st.integers(1, 12)), splits=st.tuples(st.integers(1, 5), st.integers(1, 5))
)
def test_any_grid_computes_the_layer(features: tuple[int, int], splits: tuple[int, int]) -> None:
    in_splits, out_splits = min(features[0], splits[0]), min(features[1], splits[1])
    torch.manual_seed(0)
    whole = nn.Linear(*features, dtype=torch.float64)
    options: dict[str, Any] = {"in_splits": in_splits, "out_splits": out_splits, "init_linear": whole}
    x = torch.randn(3, features[0], dtype=torch.float64)
    tiled = TiledLinear(*features, dtype=torch.float64, **options)
    torch.testing.assert_close(tiled(x), whole(x), rtol=1e-12, atol=1e-12)
    assert max(tiled.in_sizes) - min(tiled.in_sizes) <= 1
    assert tiled.in_sizes == sorted(tiled.in_sizes, reverse=True)
    pieces = TiledLinear(
        *features, dtype=torch.float64, input_is_already_split=True, combine_out_splits=False, **options
    )
    outputs = pieces(list(x.split(pieces.in_sizes, dim=-1)))
    assert [out.shape[-1] for out in outputs] == pieces.out_sizes
    torch.testing.assert_close(torch.cat(outputs, dim=-1), whole(x), rtol=1e-12, atol=1e-12)


def test_fresh_values_have_the_distribution_of_the_whole_layer() -> None:
    torch.manual_seed(0)
    layer = TiledLinear(400, 300, in_splits=4, out_splits=3)
    bound = 400**-0.5
    for parameter in layer.parameters():
        assert 0.9 * bound < parameter.abs().max() <= bound
        torch.testing.assert_close(parameter.std().item(), bound / 3**0.5, rtol=0.15, atol=0.0)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, torch.float32), (1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)]
)
@pytest.mark.parametrize("source", ["plain", "init", "optimizer"])
@pytest.mark.parametrize("when", ["before", "under init", "in init", "after"])
def test_values_of_rank_0_are_copied_wherever_they_live(stage: int, source: str, when: str, dtype: torch.dtype) -> None:
    def layer_of(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        return nn.Linear(5, 7, dtype=dtype)

    def fn(rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with Init(enabled=source == "init"):
            other = layer_of(10 + rank)
        holds_other = None
        if source == "optimizer":
            holds_other = ZeroOptimizer(nn.Sequential(other), stage=stage, lr=0.1, param_persistence_threshold=0)
        with Init(enabled="init" in when):
            torch.manual_seed(rank)
            layer = TiledLinear(5, 7, in_splits=2, out_splits=3, dtype=dtype)
            if when == "in init":
                layer.copy_params_from(other)
        if when in ("before", "under init"):
            layer.copy_params_from(other)
        optimizer = ZeroOptimizer(
            nn.Sequential(layer), stage=stage, optimizer=torch.optim.SGD, lr=0.0, param_persistence_threshold=3
        )
        if when == "after":
            layer.copy_params_from(other)
        layer(torch.ones(1, 5, dtype=dtype)).sum().backward()
        optimizer.step()  # writes the fp32 values back
        del holds_other
        return optimizer.consolidated_parameters(), layer(torch.eye(5, dtype=dtype))

    expected = layer_of(10)
    for found, out in sim.run(2, fn):
        assert torch.equal(reassemble(found, "0", 3, 2), expected.weight.detach())
        biases = [found[f"0.tiles.{2 * row}.bias"] for row in range(3)]
        assert torch.equal(torch.cat(biases), expected.bias.detach())
        torch.testing.assert_close(out, expected(torch.eye(5, dtype=dtype)))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="in_features=3 and in_splits=4"):
        TiledLinear(3, 3, in_splits=4)
    with pytest.raises(ValueError, match="out_splits=0"):
        TiledLinear(3, 3, out_splits=0)
    layer = TiledLinear(4, 2, in_splits=2)
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        layer.copy_params_from(nn.Linear(2, 4))
    with pytest.raises(ValueError, match="bias=False; this one is with bias"):
        layer.copy_params_from(nn.Linear(4, 2, bias=False))
    with pytest.raises(ValueError, match=r"\(1, 5\)"):
        layer(torch.ones(1, 5))
    with pytest.raises(ValueError, match="input_is_already_split=True"):
        layer([torch.ones(1, 2), torch.ones(1, 2)])
    split = TiledLinear(4, 2, in_splits=2, input_is_already_split=True)
    with pytest.raises(ValueError, match=r"\[2, 2\]"):
        split(torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"last sizes \[3, 1\]"):
        split([torch.ones(1, 3), torch.ones(1, 1)])
    assert "out_splits=1" in repr(layer)
