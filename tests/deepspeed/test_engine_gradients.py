"""Gradients that are not finite, transforms of torch.func, and writes into whole parameters, through the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, loss_of, net, start
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("checks", [True, False, None])
def test_bf16_says_whether_gradients_that_are_not_finite_are_used(stage: int, checks: bool | None) -> None:
    bf16 = {"enabled": True} if checks is None else {"enabled": True, "check_grad_overflow": checks}

    def job(rank: int) -> None:
        engine = start(stage, gradient_accumulation_steps=1, bf16=bf16)
        x = batches(rank, 1)[0].bfloat16()
        for number in (float("inf"), float("-inf"), float("nan")):
            engine.backward(loss_of(engine, x) * (number if rank else 1.0))
            engine.step()
        values = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
        if checks is False:
            assert engine.skipped_steps == 0
            assert all(v.isnan().any() for v in values)
        else:
            assert engine.skipped_steps == 3
            assert all(v.isfinite().all() for v in values)

    sim.run(2, job)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_transforms_of_torch_func_through_the_engine(stage: int) -> None:
    def job(rank: int) -> None:
        engine, alone, x = start(stage), net(), batches(rank, 1)[0]

        def of(model: Any) -> list[torch.Tensor]:
            def loss(one: torch.Tensor) -> torch.Tensor:
                found: torch.Tensor = model(one).square().sum()
                return found

            gradient, value = torch.func.grad_and_value(loss)(x[0])
            return [gradient, value, torch.func.jacrev(model)(x[0]), torch.func.vmap(torch.func.grad(loss))(x)]

        for found, wanted in zip(of(engine), of(alone), strict=True):  # not divided by the accumulation
            assert torch.equal(found, wanted)
        for batch in batches(rank, 2):
            engine.backward(loss_of(engine, batch))
            engine.step()
        assert engine.global_steps == 1

    sim.run(2, job)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_all_ranks_write_into_whole_parameters_stays(stage: int) -> None:
    """As in DeepSpeed, where GatheredParameters is for stage 3."""

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, config=config)[0]
        with deepspeed.zero.GatheredParameters(list(engine.parameters())):
            model.load_state_dict({"weight": torch.full((3, 3), 2.0), "bias": torch.ones(3)})
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(model.weight), torch.full((3, 3), 2.0))
        with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=1), torch.no_grad():
            model.bias.fill_(rank + 3.0)
        assert torch.equal(model.bias, torch.full((3,), 4.0))

    sim.run(2, job)
