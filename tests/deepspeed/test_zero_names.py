"""Layers and contexts of ``deepspeed.zero`` beside Init and GatheredParameters."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo.deepspeed.runtime.zero import linear, mics, partition_parameters, stage3, tiling, utils

import zoo.deepspeed as deepspeed
from zoo import sim


class Apart(nn.Linear):
    """Gives its bias beside its output."""

    def forward(self, input: torch.Tensor) -> Any:
        return F.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("combine", [True, False])
def test_tiles_that_return_their_bias(bias: bool, combine: bool) -> None:
    torch.manual_seed(0)
    whole, x = nn.Linear(7, 5, bias=bias), torch.randn(3, 7)
    tiled = deepspeed.zero.TiledLinearReturnBias(
        7, 5, bias=bias, in_splits=3, out_splits=2, combine_out_splits=combine, linear_cls=Apart, init_linear=whole
    )
    y, b = tiled(x)
    if not combine:
        assert [part.shape[1] for part in y] == [3, 2]
        y, b = torch.cat(y, 1), None if b is None else torch.cat(b)
    assert (b is None) == (not bias)
    assert torch.allclose(y + (b if bias else 0), whole(x), atol=1e-6)
    assert tiling.TiledLinearReturnBias is deepspeed.zero.TiledLinearReturnBias


def test_tiles() -> None:
    whole, x = nn.Linear(6, 4), torch.randn(2, 6)
    assert torch.allclose(deepspeed.zero.TiledLinear(6, 4, in_splits=2, out_splits=2, init_linear=whole)(x), whole(x))
    assert tiling.TiledLinear is deepspeed.runtime.zero.TiledLinear


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_layers(autocast: bool) -> None:
    torch.manual_seed(0)
    layer, x = linear.LinearModuleForZeroStage3(4, 3), torch.randn(2, 4, requires_grad=True)
    assert isinstance(layer, nn.Linear)
    with torch.autocast("cpu", enabled=autocast):
        expected = F.linear(x, layer.weight, layer.bias)
        for found in (
            layer(x), linear.zero3_linear_wrap(x, layer.weight, layer.bias),
            linear.LinearFunctionForZeroStage3.apply(x, layer.weight, layer.bias),
        ):  # fmt: skip
            assert found.dtype == (torch.bfloat16 if autocast else torch.float32)
            assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.float().sum(), layer.weight)
    assert torch.allclose(gradient, x.sum(0).expand(3, 4), atol=0.05)
    assert torch.equal(linear.zero3_linear_wrap(x, layer.weight), F.linear(x, layer.weight))
    assert partition_parameters.zero3_linear_wrap is linear.zero3_linear_wrap
    assert not hasattr(linear.LinearModuleForZeroStage3(4, 3, bias=False).bias, "grad")


def test_decorators() -> None:
    assert linear.noop_decorator(print) is print
    assert linear.autocast_custom_fwd.func is torch.amp.custom_fwd
    assert linear.autocast_custom_bwd.func is torch.amp.custom_bwd
    assert linear.autocast_custom_fwd.keywords["device_type"] in ("cpu", "cuda")

    class Twice(torch.autograd.Function):
        @staticmethod
        @linear.autocast_custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        @linear.autocast_custom_bwd
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return 2 * g

    x = torch.ones(2, requires_grad=True)
    Twice.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.matrix
@pytest.mark.parametrize("made", ["MiCS_Init", "Init", None])
def test_shard_groups(made: str | None) -> None:
    def job(rank: int) -> list[float]:
        torch.set_num_threads(1)
        document = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "mics_shard_size": 2, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        torch.manual_seed(0)
        if made is None:
            model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        else:
            with getattr(deepspeed.zero, made)(config_dict_or_path=document):
                model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
            assert utils.is_zero_param(model[0].weight)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)
        assert utils.is_zero_param(model[0].weight)
        dice, losses = torch.Generator().manual_seed(rank), []
        for _ in range(3):
            loss = engine(torch.randn(2, 3, generator=dice)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    plain = _plain()
    for mine, theirs in zip(sim.run(4, job), plain, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert mics.MiCS_Init is deepspeed.zero.MiCS_Init


def _plain() -> list[list[float]]:
    """One process with the batches of four."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    dice = [torch.Generator().manual_seed(rank) for rank in range(4)]
    found: list[list[float]] = [[] for _ in range(4)]
    for _ in range(3):
        losses = [model(torch.randn(2, 3, generator=d)).square().mean() for d in dice]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for mine, loss in zip(found, losses, strict=True):
            mine.append(loss.item())
    return found


def test_generation_from_whole_parameters() -> None:
    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3))
        expected = [p.detach().clone() for p in model.parameters()]
        engine, *_ = deepspeed.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"},
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            },
        )  # fmt: skip
        with deepspeed.zero.unwrap_model_for_generation(engine) as whole, torch.no_grad():
            assert all(torch.equal(p, e) for p, e in zip(whole.parameters(), expected, strict=True))
            assert whole.module(torch.ones(1, 3)).shape == (1, 3)
        assert stage3.unwrap_model_for_generation is deepspeed.zero.unwrap_model_for_generation

    sim.run(2, job)


def test_tensors_of_a_tree() -> None:
    Pair = namedtuple("Pair", "a b")
    one = torch.ones(1)
    found = utils.apply_to_tensors_only(lambda t: t + 1, [one, (one, "x"), {"k": one}, Pair(one, 3)])
    assert [found[0].item(), found[1][0].item(), found[1][1], found[2]["k"].item()] == [2, 2, "x", 2]
    assert isinstance(found[3], Pair)
    assert (found[3].a.item(), found[3].b) == (2, 3)
    assert not utils.is_zero_param(one)
    assert not utils.is_zero_param("x")


def test_a_wrapped_constructor_gives_its_dtype_and_its_device_unless_a_call_says_another() -> None:
    from zoo.deepspeed.runtime.zero.partition_parameters import zero_wrapper_for_fp_tensor_constructor

    ones = zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.half, torch.device("meta"))
    assert (ones(2, 3).dtype, ones(2, 3).device.type) == (torch.half, "meta")
    assert ones(2, dtype=torch.int).dtype == torch.int
    assert (ones(2, device="cpu").device.type, ones(2, dtype=torch.double).dtype) == ("cpu", torch.half)
