"""Attributes that a program sets on an engine or an optimizer: they are obeyed, or refused with what does it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net, start
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.comm import CollectiveMismatchError
from zoo.zero import ZeroOptimizer


def step(engine: Any, rank: int = 0) -> list[torch.Tensor]:
    for x in batches(rank, engine.gradient_accumulation_steps()):
        engine.backward(loss_of(engine, x))
        engine.step()
    return [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_norm_to_clip_to(stage: int) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    changed, other = start(stage, optimizer=sgd), start(stage, optimizer=sgd, gradient_clipping=0.01)
    changed.optimizer.clip_grad = 0.01
    assert changed.optimizer.clip_grad == changed.gradient_clipping() == changed._config.gradient_clipping == 0.01
    assert all(map(torch.equal, step(changed), step(other)))
    never = start(stage, optimizer=sgd, gradient_clipping=0)
    assert not never.optimizer.clip_grad
    first = step(never)
    never.optimizer.clip_grad = 0.01
    changed.optimizer.clip_grad = 0
    assert changed.optimizer.clip_grad == 0
    assert changed.get_global_grad_norm() > 0.01
    assert (torch.cat([a.flatten() - b.flatten() for a, b in zip(first, step(never), strict=True)])).norm() < 0.0011
    for wrong in (-1, float("nan"), math.inf, "1", None, True):
        with pytest.raises(ValueError, match=r"optimizer\.clip_grad = .*; give a finite number >= 0"):
            changed.optimizer.clip_grad = wrong
    assert changed.optimizer.clip_grad == 0


def test_ranks_that_clip_to_other_norms_are_told() -> None:
    def job(rank: int) -> None:
        engine = start(1, gradient_accumulation_steps=1)
        engine.optimizer.clip_grad = 0.1 * (1 + rank)
        engine.backward(loss_of(engine, batches(0, 1)[0]))
        with pytest.raises(CollectiveMismatchError, match=r"clip_norm"):
            engine.step()
        engine.optimizer.clip_grad = 0.1
        engine.step()

    sim.run(2, job)


def test_the_norm_of_zoos_optimizer() -> None:
    optimizer = ZeroOptimizer(net(), stage=1, lr=0.1, clip_norm=1.0)
    optimizer.clip_norm = 2.0
    assert optimizer.clip_norm == 2.0
    with pytest.raises(ValueError, match=r"clip_norm='x'; it must be a norm > 0"):
        optimizer.clip_norm = "x"  # type: ignore[assignment]
    optimizer.clip_norm = 0.0
    assert optimizer.clip_norm == math.inf
    with pytest.raises(ValueError, match=r"its steps do not measure the norm.*clip_norm=math\.inf"):
        ZeroOptimizer(net(), stage=1, lr=0.1).clip_norm = 1.0
    with pytest.raises(ValueError, match=r"its steps do not measure the norm"):
        start(1, zero={"update_in_backward": True}, gradient_clipping=0).optimizer.clip_grad = 1.0


OF_OPTIMIZER = {
    "gradient_clipping": r"optimizer\.clip_grad", "max_grad_norm": r"optimizer\.clip_grad",
    "clip_norm": r"optimizer\.clip_grad", "micro_step_id": r"engine\.set_gradient_accumulation_boundary\(\)",
    "is_gradient_accumulation_boundary": r"engine\.set_gradient_accumulation_boundary\(\)",
    "gradient_accumulation_steps": r"engine\.set_train_batch_size\(\)", "loss_scaler": r"optimizer\.cur_scale",
    "external_loss_scale": r"optimizer\.cur_scale", "custom_loss_scaler": r"optimizer\.cur_scale",
    "dynamic_loss_scale": "fp16", "overlap_comm": r"zero_optimization\.overlap_comm",
    "reduce_bucket_size": r"zero_optimization\.reduce_bucket_size", "param_groups": r"optimizer\.param_groups\[0\]",
    "round_robin_gradients": r"zero_optimization\.round_robin_gradients",
    "gradient_predivide_factor": r"the configuration's gradient_predivide_factor",
    "gradient_accumulation_dtype": r"data_types\.grad_accum_dtype",
    "postscale_gradients": "prescale_gradients", "partition_gradients": r"zero_optimization\.stage",
    "overflow": "nothing would follow", "averaged_gradients": "safe_set_full_grad",
    "state": "load_state_dict", "optimizer": "initialize", "step": "a function", "grad_norm": "nothing would follow",
}  # fmt: skip
OF_ENGINE = {
    "gradient_clipping": r"engine\.optimizer\.clip_grad", "loss_scale": r"engine\.optimizer\.cur_scale",
    "gradient_accumulation_steps": r"engine\.set_train_batch_size\(\)",
    "train_batch_size": r"engine\.set_train_batch_size\(\)",
    "train_micro_batch_size_per_gpu": r"engine\.set_train_micro_batch_size\(\)",
    "steps_per_print": "the configuration's steps_per_print", "zero_overlap_comm": r"zero_optimization\.overlap_comm",
    "fp16_enabled": r"fp16\.enabled", "gradient_average": "the mean over ranks", "module": r"engine\.compile\(\)",
    "optimizer": "initialize", "config": "initialize", "backward": "a function", "device": "nothing would follow",
    "micro_step_id": r"engine\.set_gradient_accumulation_boundary\(\)", "zero_optimization_stage": r"zero_optimization",
    "overlap_comm": r"zero_optimization\.overlap_comm", "prescale_gradients": "the configuration's prescale_gradients",
    "dp_world_size": "nothing would follow", "dynamic_loss_scale": "fp16",
}  # fmt: skip


def test_what_would_be_ignored_is_refused() -> None:
    for stage in (0, 3):
        engine = start(stage)
        for on, names in (("optimizer", OF_OPTIMIZER), ("engine", OF_ENGINE)):
            thing = engine if on == "engine" else engine.optimizer
            for name, instead in names.items():
                before = set(vars(thing))
                with pytest.raises(AttributeError, match=rf"{on}\.{name} = 7: .*{instead}"):
                    setattr(thing, name, 7)
                assert set(vars(thing)) == before
        with pytest.raises(AttributeError, match=r"engine\._config\.gradient_clipping = 7: .*engine\.optimizer\.clip"):
            engine._config.gradient_clipping = 7
        with pytest.raises(AttributeError, match=r"engine\._config\.zero_enabled = 7: .*initialize"):
            engine._config.zero_enabled = 7
        with pytest.raises(AttributeError, match=r"loss_scaler\.scale_window = 7: .*fp16\.loss_scale_window"):
            engine.optimizer.loss_scaler.scale_window = 7


def test_a_program_may_have_attributes_of_its_own_and_wrap_methods() -> None:
    engine, calls = start(1, gradient_accumulation_steps=1), []
    own = engine.step

    def counted() -> None:
        calls.append(1)
        own()

    engine.step, engine.of_mine, engine._mine, engine.optimizer.of_mine = counted, 1, 2, 3
    assert (engine.of_mine, engine._mine, engine.optimizer.of_mine) == (1, 2, 3)
    step(engine)
    assert calls == [1]
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)  # wraps the step
    assert schedule.get_last_lr() == [0.01]
    engine.mine = nn.Linear(1, 1)
    assert isinstance(engine.mine, nn.Linear)


def test_another_loader_is_used() -> None:
    model = net()
    document = config(1, gradient_accumulation_steps=1)
    engine = deepspeed.initialize(model=model, config=document, training_data=[torch.zeros(5)] * 4)[0]
    seen: list[float] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(float(args[0].mean())))
    engine.training_dataloader = [torch.full((2, 5), 3.0)]
    assert engine.engine.dataloader == engine.training_dataloader
    with pytest.raises(ValueError, match="loss"):  # the model gives none
        engine.train_batch()
    assert seen == [3.0]
