"""Modes of torch around a model: autocast, torch.func, inference mode, compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zero.blocks import RATE, STAGES, Blocks, build, check, data, one_step, twin
from torch import nn

from zoo import sim
from zoo.zero import ShardedModel, ZeroConfig, ZeroOptimizer

# Autocast ------------------------------------------------------------------------------------------------------------


def _two_and_two(model: nn.Module, ranks: list[int], world: int) -> None:
    for rank in ranks:
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(data(rank, step).float()).float().square().mean() / world for step in range(2)]
        for loss in losses:
            loss.backward()


def _evaluation_first(model: nn.Module, ranks: list[int], world: int) -> None:
    for rank in ranks:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                model(data(rank, 9).float())
            loss = model(data(rank).float()).float().square().mean() / world
        loss.backward()


def _two_and_one(model: nn.Module, ranks: list[int], world: int) -> None:
    for rank in ranks:
        with torch.autocast("cpu", torch.bfloat16):
            losses = [model(data(rank, step).float()).float().square().mean() / world for step in range(2)]
        (losses[0] + losses[1]).backward()


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("run", "exact"), [(_two_and_two, 1e-6), (_evaluation_first, 1e-6), (_two_and_one, 1e-3)])
def test_several_passes_inside_of_one_autocast(stage: int, run: Callable[..., None], exact: float) -> None:
    """Where one backward goes through two passes, torch adds their gradients in bf16, and this in fp32."""

    def fn(rank: int) -> None:
        model = Blocks()
        optimizer = ZeroOptimizer(
            model, stage=stage, optimizer=torch.optim.SGD, lr=RATE, param_persistence_threshold=0, reduce_bucket_size=1
        )
        run(model, [rank], 1)
        optimizer.step()
        for name, value in optimizer.consolidated_parameters().items():
            torch.testing.assert_close(value, expected[name], rtol=exact, atol=exact)

    plain = Blocks()
    run(plain, [0, 1], 2)
    torch.optim.SGD(plain.parameters(), lr=RATE).step()
    expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
    sim.run(2, fn)


# torch.func ----------------------------------------------------------------------------------------------------------


def _per_sample(model: nn.Module, x: torch.Tensor) -> Any:
    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, parameters, (sample[None],))
        return out.square().mean()

    values = {n: torch.zeros(p.shape, dtype=p.dtype) for n, p in model.named_parameters()}
    return torch.func.vmap(torch.func.grad(loss), (None, 0))(values, x)


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda inputs: model(inputs).square().sum())(x),
    "grad and value": lambda model, x: torch.func.grad_and_value(lambda inputs: model(inputs).square().sum())(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "per sample": _per_sample,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


@pytest.mark.matrix
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_compute_where_parameters_are_whole_and_are_refused_by_name(stage: int, transform: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        with optimizer.gathered():
            aside = copy.deepcopy(model)
        wanted = TRANSFORMS[transform](aside, data(rank))
        for _ in range(2):
            if stage == 3:
                with pytest.raises(NotImplementedError, match=r"transform of torch\.func.*stage 3.*deepcopy"):
                    TRANSFORMS[transform](model, data(rank))
            else:
                torch.testing.assert_close(TRANSFORMS[transform](model, data(rank)), wanted, rtol=0, atol=0)
            optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_what_leads_to_parameters_behind_a_transform_is_refused(stage: int, transform: str) -> None:
    def fn(rank: int) -> None:
        model, optimizer = build(stage)
        loss = TRANSFORMS[transform](model, data(rank)).square().mean()
        with pytest.raises(RuntimeError, match=r"transform of torch\.func"):
            loss.backward()
        optimizer.zero_grad()
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)


# Compilation ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("what", ["model", "blocks"])
def test_what_is_compiled_trains(stage: int, what: str) -> None:
    def fn(rank: int) -> None:
        torch._dynamo.reset()
        model: Any = Blocks().double()
        for module in [model] if what == "model" else model.blocks:
            module.compile(backend="eager")
        model, optimizer = build(stage, model)
        for step in range(3):
            one_step(model, optimizer, rank, step)
        check(optimizer, twin(2, 3))

    sim.run(2, fn)


# Inference mode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_construction_under_inference_mode_is_refused(stage: int) -> None:
    def fn(rank: int) -> None:
        model = Blocks().double()
        with torch.inference_mode():
            with pytest.raises(ValueError, match=r"construction under torch\.inference_mode"):
                ZeroOptimizer(model, stage=stage, lr=RATE)
            with pytest.raises(ValueError, match=r"construction under torch\.inference_mode"):
                ShardedModel(model, config=ZeroConfig(stage=stage), trains=False)
            built = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"parameter 'weight' was made under torch\.inference_mode"):
            ZeroOptimizer(built, stage=stage, lr=RATE)
        with torch.no_grad():
            _, optimizer = build(stage, model)
        one_step(model, optimizer, rank)
        check(optimizer, twin(2))

    sim.run(2, fn)
