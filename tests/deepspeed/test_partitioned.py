"""What programs see of values that are not on this rank, and engines and schedules that DeepSpeed makes beside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.deepspeed.test_engine import batches, config, loss_of, net, start
from torch import nn
from zoo.deepspeed.moe.layer import MoE
from zoo.deepspeed.pipe import PipelineModule
from zoo.deepspeed.runtime.zero.stage3 import DeepSpeedZeRoOffload

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError
from zoo.zero import PartitionedAccessError


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loops_over_gradients_find_none_where_they_are_partitioned(stage: int, accumulation: int) -> None:
    """And what they would have cut off, as a clip that is left in does, changes nothing."""

    def job(rank: int, looks: bool) -> list[torch.Tensor]:
        engine = start(stage, gradient_accumulation_steps=accumulation)
        for x in batches(rank, 2 * accumulation):
            engine.backward(loss_of(engine, x))
            if looks and stage and engine.is_gradient_accumulation_boundary():
                norms = [p.grad.norm() for p in engine.module.parameters() if p.grad is not None]
                assert norms == []
                assert torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3) == 0
            full = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
            assert all(g is not None for g in full) or not engine.is_gradient_accumulation_boundary()
            engine.step()
        return [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]

    looked, plain = (sim.run(2, lambda rank, b=b: job(rank, b))[0] for b in (True, False))
    assert all(map(torch.equal, looked, plain))


def test_at_stage_0_a_gradient_that_is_not_at_hand_is_refused() -> None:
    """It was read as the mean within a step: what came since is not all of it. None would say that there is nothing."""

    def job(rank: int) -> None:
        engine = start(0, gradient_accumulation_steps=3)
        weight = next(engine.module.parameters())
        first, second, third = batches(rank, 3)
        engine.backward(loss_of(engine, first))
        assert weight.grad is not None
        assert deepspeed.utils.safe_get_full_grad(weight) is not None
        engine.step()
        engine.backward(loss_of(engine, second))
        with pytest.raises(PartitionedAccessError, match="safe_get_full_grad"):
            weight.grad.norm()
        engine.step()
        engine.backward(loss_of(engine, third))
        assert torch.equal(weight.grad, deepspeed.utils.safe_get_full_grad(weight))
        engine.step()

    sim.run(2, job)


def test_names_of_a_state_dict_are_there_at_stage_3() -> None:
    def job(rank: int) -> None:
        engine = start(3)
        for found in (engine.module.state_dict(), engine.state_dict()):
            assert len(found) == 4
            for value in found.values():
                assert value.is_meta
                with pytest.raises((NotImplementedError, RuntimeError)):
                    torch.zeros(value.shape).copy_(value)
        assert [tuple(v.shape) for v in engine.module.state_dict().values()] == [(9, 5), (9,), (3, 9), (3,)]
        whole = engine.module_state_dict()
        assert not any(value.is_meta for value in whole.values())

    sim.run(2, job)


def test_an_engine_that_only_evaluates_at_stage_3() -> None:
    def job(rank: int) -> None:
        document = config(3)
        del document["optimizer"]
        engine, optimizer, *_ = deepspeed.initialize(model=net(), config=document)
        assert engine.optimizer is optimizer
        assert type(optimizer) is DeepSpeedZeRoOffload
        assert not hasattr(optimizer, "parameter_offload")
        optimizer.forward_hooks, optimizer.backward_hooks = [], []
        optimizer._register_deepspeed_module(optimizer.module)
        optimizer.empty_partition_cache()
        assert (engine.get_mom(), engine.basic_optimizer, engine.loss_scale()) == ([], None, 1.0)
        assert engine(batches(rank, 1)[0]).shape == (2, 3)
        assert not engine.dynamic_loss_scale()

    sim.run(2, job)
    document = config(0)
    del document["optimizer"]
    assert deepspeed.initialize(model=net(), config=document)[1] is None


def test_schedules_of_torch_by_their_names() -> None:
    document = config(1, gradient_accumulation_steps=1)
    document["scheduler"] = {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}
    engine, *_, schedule = deepspeed.initialize(model=net(), config=document)
    assert type(schedule) is torch.optim.lr_scheduler.StepLR
    rates = []
    for x in batches(0, 4):
        rates += engine.get_lr()
        engine.backward(loss_of(engine, x))
        engine.step()
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.005])
    assert engine.scheduler_name() == "StepLR"
    for wrong in ({"type": "StepLR", "params": {"gama": 1}}, {"type": "NoLR"}, {"type": "_Private"}):
        with pytest.raises(ConfigError):
            deepspeed.initialize(model=net(), config={**document, "scheduler": wrong})


def test_sections_of_other_models_and_stages_as_text() -> None:
    document = config(1, pipeline={"stages": 4, "partition": "uniform"})
    document["zero_optimization"]["stage"] = "2"
    assert deepspeed.initialize(model=net(), config=document)[0].zero_optimization_stage() == 2


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x), self.linear.bias


@pytest.mark.parametrize("residual", [False, True])
def test_experts_that_return_their_bias_beside(residual: bool) -> None:
    made = []
    for kind in (Biased, lambda: Biased().linear):
        torch.manual_seed(0)
        made.append(MoE(4, kind(), num_experts=2, k=1, use_residual=residual, use_rts=False))
    x = torch.randn(6, 4)
    outputs = [layer(x) for layer in made]
    torch.testing.assert_close(outputs[0][0], outputs[1][0])
    inner = made[0].deepspeed_moe
    assert torch.equal(inner.exp_counts, outputs[0][2])
    assert torch.equal(inner.l_aux, outputs[0][1])
    assert inner.l_aux.requires_grad  # a program may add it to its loss
    assert (inner.ep_size, inner.num_local_experts, inner.ep_group_name) == (1, 2, "ep_size_1")
    assert inner.gate.wg.weight is made[0].gate.weight
    assert (inner.gate.k, inner.gate.capacity_factor, inner.gate.drop_tokens) == (1, 1.0, True)
    assert list(inner.experts.deepspeed_experts) == list(made[0].experts.list)
    with pytest.raises(AttributeError, match="the layer would not see it"):
        inner.gate.capacity_factor = 0.5


def test_layers_are_copied_after_a_forward() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, k=1, use_rts=False)
    x = torch.randn(6, 4)
    outputs = layer(x)
    again = copy.deepcopy(layer)
    assert again.deepspeed_moe.l_aux is None
    assert torch.equal(again(x)[0], outputs[0])


def test_the_expert_that_is_given_stays_as_it_is() -> None:
    expert = Biased()
    MoE(4, expert, num_experts=2, k=1)
    assert isinstance(expert(torch.ones(1, 4)), tuple)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def pipeline(*layers: Any, **more: Any) -> Any:
    model = PipelineModule(list(layers), num_stages=1, **more)
    document = {k: v for k, v in config(0).items() if k != "zero_optimization"}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document)[0]


def test_a_pipeline_whose_last_layer_gives_the_loss() -> None:
    def job(rank: int) -> None:
        engine = pipeline(Loss())
        pairs = [(torch.randn(2, 3), torch.zeros(2)) for _ in range(2)]
        expected = torch.stack([engine.module(x) for x, _ in pairs]).mean()
        torch.testing.assert_close(engine.eval_batch(iter(pairs), reduce_output=None)[0], engine.module(pairs[0][0]))
        assert engine.train_batch(iter(pairs)).item() > 0
        assert expected > 0
        engine.set_batch_fn(lambda batch: (batch["x"], None))
        assert engine.train_batch(iter([{"x": x} for x, _ in pairs])).item() > 0

    sim.run(2, job)


def test_outputs_of_an_evaluation_are_those_of_the_last_micro_batch() -> None:
    def job(rank: int) -> None:
        engine = pipeline(nn.Linear(3, 3), loss_fn=nn.MSELoss())
        pairs = [(torch.randn(2, 3), torch.zeros(2, 3)) for _ in range(2)]
        loss, logits = engine.eval_batch(iter(pairs), return_logits=True)
        torch.testing.assert_close(logits, engine.module(pairs[1][0]))
        assert loss.numel() == 1

    sim.run(2, job)


def test_names_at_the_root() -> None:
    assert deepspeed.PipelineModule is PipelineModule
    assert issubclass(deepspeed.PipelineEngine, deepspeed.DeepSpeedEngine)
    assert (deepspeed.ADAM_OPTIMIZER, deepspeed.TORCH_DISTRIBUTED_DEFAULT_PORT) == ("adam", 29500)
    assert deepspeed.dist is deepspeed.comm


# -- what libraries save ----------------------------------------------------------------------------------------------

SAVES = """
def save_pretrained(model, is_main_process=True, state_dict=None):
    if state_dict is None:
        state_dict = model.state_dict()
    return {name: value.clone() for name, value in state_dict.items()} if is_main_process else {}
"""


@pytest.mark.parametrize("main", ["every rank", "rank 0", "rank 0 alone"])
def test_what_a_library_saves_at_stage_3_is_whole_or_refused_on_all_ranks(main: str) -> None:
    space: dict[str, Any] = {"__name__": "transformers.modeling_utils"}
    exec(SAVES, space)

    def job(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        first = {name: value.clone() for name, value in model.state_dict().items()}
        config = {
            "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        chief = main == "every rank" or rank == 0
        if main != "rank 0 alone" or rank == 0:
            with pytest.raises(
                PartitionedAccessError, match=r"save_pretrained\(\) without state_dict=.*All ranks call"
            ):
                space["save_pretrained"](engine.module, chief)
        whole = engine._zero3_consolidated_16bit_state_dict()
        saved = space["save_pretrained"](engine.module, rank == 0, whole)
        assert all(torch.equal(saved[name], first[name]) for name in (first if rank == 0 else ()))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            saved = space["save_pretrained"](engine.module, chief)
        assert not chief or all(torch.equal(saved[name], first[name]) for name in first)

    sim.run(2, job)
