"""``gradient_allreduce_op``: "sum" is plain torch's gradient of the sum of the ranks' losses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net
from torch import nn
from zoo.deepspeed.runtime.config import DeepSpeedConfig

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError

RANKS = 3  # no power of two


def document(stage: int, **more: Any) -> dict[str, Any]:
    return config(
        stage, gradient_allreduce_op="SUM", gradient_accumulation_steps=2, gradient_clipping=0.0,
        optimizer={"type": "SGD", "params": {"lr": 0.25}}, **more,
    )  # fmt: skip


def plain(steps: int, clip: float = 0.0) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    data = [batches(rank, 2 * steps) for rank in range(RANKS)]
    for step in range(steps):
        for micro, rank in itertools.product(range(2), range(RANKS)):
            (loss_of(model, data[rank][2 * step + micro]) / 2).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.matrix
@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        (0, {}), (1, {}), (2, {}), (2, {"zero": {"reduce_scatter": False}}), (1, {"prescale_gradients": True}),
        (0, {"gradient_predivide_factor": 4.0}), (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    ],
)  # fmt: skip
def test_a_sum_is_that_of_one_process(stage: int, more: dict[str, Any], by_itself: bool) -> None:
    def program(rank: int) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        engine = deepspeed.initialize(model=net(), config=document(stage, **more))[0]
        for x in batches(rank, 4):
            loss = loss_of(engine, x)
            loss.backward() if by_itself else engine.backward(loss)
            engine.step()
        return [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.parameters()]

    wanted = plain(2)
    for ours in sim.run(RANKS, program):
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_a_sum_is_clipped_by_its_own_norm() -> None:
    def program(rank: int) -> tuple[list[torch.Tensor], float]:
        engine = deepspeed.initialize(model=net(), config={**document(2), "gradient_clipping": 0.5})[0]
        for x in batches(rank, 4):
            engine.backward(loss_of(engine, x))
            engine.step()
        return [p.detach().clone() for p in engine.parameters()], float(engine.get_global_grad_norm())

    for ours, norm in sim.run(RANKS, program):
        assert norm > 0.5
        for one, other in zip(ours, plain(2, clip=0.5), strict=True):
            torch.testing.assert_close(one, other)


def test_which_words_there_are() -> None:
    for word, means in (("mean", "mean"), ("SUM", "sum")):
        assert DeepSpeedConfig({"train_batch_size": 1, "gradient_allreduce_op": word}).gradient_allreduce_op == means
    assert DeepSpeedConfig({"train_batch_size": 1}).gradient_allreduce_op == "mean"
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op 'max'; allowed are mean and sum"),
        ({"gradient_allreduce_op": 1}, "Invalid gradient_allreduce_op 1"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 3}}, "not supported with ZeRO stage 3"),
        ({"gradient_allreduce_op": "sum", "zero_optimization": {"zenflow": {}}}, "not supported with ZenFlow"),
        ({"gradient_allreduce_op": "sum", "compile": {"deepcompile": True}}, "not supported with DeepCompile"),
    )
    for given, says in wrong:
        with pytest.raises(ValueError, match=says):
            DeepSpeedConfig({"train_batch_size": 1, **given})
    with pytest.raises(ConfigError, match="not supported with ZeRO stage 3"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=document(3))


def test_a_pipeline_has_means() -> None:
    from zoo.deepspeed.pipe import PipelineModule

    model = PipelineModule([nn.Linear(3, 3)], num_stages=1, loss_fn=nn.MSELoss())
    with pytest.raises(NotImplementedError, match="multiply the loss by the number of ranks"):
        deepspeed.initialize(model=model, config=document(1))
