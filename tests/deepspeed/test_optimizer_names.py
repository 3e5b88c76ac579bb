"""Muon and the optimizers that send signs, under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo.deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from zoo.deepspeed.runtime.zero.muon.original_muon import Muon, MuonWithAuxAdam, muon_update

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.deepspeed.adapters.optimizers import ops as optimizers


def exact(direction: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(direction.double(), full_matrices=False)
    return u @ v


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nesterov", [True, False])
def test_muons_update_is_orthogonal_and_scaled_and_its_momentum_an_average(nesterov: bool) -> None:
    grad, momentum = matrix(12, 5), matrix(12, 5, seed=1)
    average = 0.9 * momentum + 0.1 * grad
    wanted = 0.1 * grad + 0.9 * average if nesterov else average
    before = grad.clone()
    update = muon_update(grad, momentum, beta=0.9, nesterov=nesterov)
    torch.testing.assert_close(momentum, average)
    assert torch.equal(grad, before)
    # Five steps of the iteration bring singular values near 1, between about 0.7 and 1.2; directions are exact ones.
    scaled = update / (12 / 5) ** 0.5
    inner = (scaled.double() * exact(wanted)).sum() / 5
    assert 0.65 < inner < 1.25
    assert torch.linalg.svdvals(scaled).aminmax().min > 0.6
    assert torch.linalg.svdvals(scaled).max() < 1.3


def test_stacked_experts_and_heads_are_orthogonal_each_by_itself() -> None:
    grad = matrix(3, 8, 4)
    stacked = muon_update(grad, torch.zeros_like(grad), is_expert_group=True)
    for i in range(3):
        assert torch.equal(stacked[i], muon_update(grad[i], torch.zeros(8, 4)))
    heads = muon_update(grad.view(24, 4), torch.zeros(24, 4), num_heads=3)
    assert torch.equal(heads, stacked.view(24, 4))
    kernel = matrix(6, 3, 2, 2)
    flat = muon_update(kernel.view(6, 12), torch.zeros(6, 12))
    assert torch.equal(muon_update(kernel, torch.zeros_like(kernel)), flat.view_as(kernel))
    assert muon_update(grad.bfloat16(), torch.zeros_like(grad).bfloat16()).dtype == torch.bfloat16
    for call, says in (
        ({"ns_method": "other"}, "allowed are gram, standard"), ({"num_heads": 5}, "whose rows they divide"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            muon_update(matrix(6, 4), torch.zeros(6, 4), **call)
    with pytest.raises(ValueError, match="has no matrices"):
        muon_update(matrix(6), torch.zeros(6))


def test_muon_takes_its_updates_and_adam_the_rest_with_the_documented_defaults() -> None:
    p, q = nn.Parameter(matrix(6, 4)), nn.Parameter(matrix(5))
    alone, vector = nn.Parameter(p.detach().clone()), nn.Parameter(q.detach().clone())
    together = MuonWithAuxAdam([{"params": [p], "use_muon": True}, {"params": [q], "use_muon": False}])
    muon = Muon([alone])
    adam = torch.optim.AdamW([vector], lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0)
    expected, momentum = p.detach().clone(), torch.zeros(6, 4)
    for step in range(3):
        p.grad, q.grad = matrix(6, 4, seed=step), matrix(5, seed=9 + step)
        alone.grad, vector.grad = p.grad.clone(), q.grad.clone()
        expected -= 0.02 * muon_update(p.grad, momentum)
        for optimizer in (together, muon, adam):
            optimizer.step()
    torch.testing.assert_close(p.detach(), expected, atol=3 * 0.02 * 2**-7, rtol=0)  # directions are computed in bf16
    assert torch.equal(alone, p)
    torch.testing.assert_close(q.detach(), vector.detach())
    with pytest.raises(ValueError, match='group 0 does not say "use_muon"'):
        MuonWithAuxAdam([{"params": [p]}])
    with pytest.raises(ValueError, match="group 0 has eps; known are lr, momentum, weight_decay"):
        MuonWithAuxAdam([{"params": [p], "use_muon": True, "eps": 1e-8}])


PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 2}, "OneBitLamb": {"freeze_step": 3, "coeff_beta": 0.5},
    "ZeroOneAdam": {"var_freeze_step": 2, "local_step_scaler": 2, "local_step_clipper": 2},
}  # fmt: skip
CLASSES = {"OneBitAdam": OnebitAdam, "OneBitLamb": OnebitLamb, "ZeroOneAdam": ZeroOneAdam}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_what_sends_signs_trains_as_the_one_that_a_configuration_names(kind: str) -> None:
    def trained(rank: int, by_name: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
        optimizer = None
        if by_name:
            config["optimizer"] = {"type": kind, "params": {"lr": 0.01, **PARAMS[kind]}}
        else:
            optimizer = CLASSES[kind](model.parameters(), lr=0.01, **PARAMS[kind])
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        for step in range(6):
            x = matrix(2, 5, seed=10 * rank + step)
            engine.backward((engine(x) - x[:, :3]).square().mean())
            engine.step()
        return [p.detach().clone() for p in model.parameters()]

    named = sim.run(2, lambda rank: trained(rank, True))
    given = sim.run(2, lambda rank: trained(rank, False))
    for one, other in zip(named, given, strict=True):
        assert all(map(torch.equal, one, other))
    for name in ("max_grad_norm", "amsgrad"):
        with pytest.raises(ValueError, match="gradient_clipping" if name == "max_grad_norm" else "amsgrad"):
            CLASSES[kind]([nn.Parameter(torch.ones(2))], **{name: 1.0 if name == "max_grad_norm" else True})


class TestWhatInitializeGives:
    """At stage 0 in fp32 it is the program's optimizer, or the one that the configuration names."""

    @staticmethod
    def start(stage: int = 0, kind: str | None = None, **given: Any) -> Any:
        document = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
        if kind is not None:
            document["optimizer"] = {"type": kind, "params": {"lr": 0.1}}
        return deepspeed.initialize(config=document, **{"model": nn.Linear(2, 2), **given})[1]

    def test_of_the_configuration(self) -> None:
        from zoo.deepspeed.ops.adam import FusedAdam
        from zoo.deepspeed.ops.lamb import FusedLamb
        from zoo.deepspeed.ops.lion import FusedLion

        for kind, wanted in (("Adam", FusedAdam), ("AdamW", FusedAdam), ("Lion", FusedLion), ("Lamb", FusedLamb)):
            found = self.start(kind=kind)
            assert isinstance(found, wanted)
            assert isinstance(found, torch.optim.Optimizer)
            assert not isinstance(found, torch.optim.SGD)

    def test_of_the_program(self) -> None:
        model = nn.Linear(2, 2)
        own = torch.optim.AdamW(model.parameters(), lr=0.1)
        found = self.start(model=model, optimizer=own)
        assert found == own
        assert isinstance(found, torch.optim.AdamW)
        assert found != torch.optim.AdamW(model.parameters(), lr=0.1)
        assert len({found, found}) == 1
        assert isinstance(self.start(optimizer=torch.optim.SGD), torch.optim.SGD)

    def test_of_a_zero_stage_it_is_a_zero_optimizer(self) -> None:
        from zoo.deepspeed.ops.adam import FusedAdam
        from zoo.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        found = self.start(1, "Adam")
        assert isinstance(found, DeepSpeedZeroOptimizer)
        assert not isinstance(found, FusedAdam)
        assert found != found.optimizer


@pytest.mark.parametrize(
    ("kind", "offloaded", "wanted"),
    [
        ("AdamW", False, "FusedAdam"), ("Adam", True, "DeepSpeedCPUAdam"), ("Lion", False, "FusedLion"),
        ("Lion", True, "DeepSpeedCPULion"), ("Adagrad", True, "DeepSpeedCPUAdagrad"), ("SGD", False, "none of them"),
    ],
)  # fmt: skip
def test_the_wrapped_optimizer_is_taken_for_deepspeeds_class(kind: str, offloaded: bool, wanted: str) -> None:
    model = nn.Linear(4, 4)
    section: dict[str, Any] = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offloaded else {})
    document = {"train_batch_size": 2, "optimizer": {"type": kind, "params": {"lr": 0.1}}, "zero_optimization": section}
    engine = deepspeed.initialize(model=model, config=document, model_parameters=model.parameters())[0]
    found = engine.optimizer.optimizer
    for name in ("FusedAdam", "DeepSpeedCPUAdam", "FusedLion", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad"):
        assert isinstance(found, getattr(optimizers, name)) is (name == wanted)
    assert isinstance(found, torch.optim.Optimizer)
    assert found is engine.optimizer.optimizer
    assert getattr(found, "adam_w_mode", None) is ({"AdamW": True, "Adam": True}.get(kind))
    found.mark, found.param_groups[0]["lr"] = 5, 0.2  # what is written reaches the optimizer itself
    inner = engine.engine.optimizer.inner
    assert (inner.mark, inner.param_groups[0]["lr"]) == (5, 0.2)
