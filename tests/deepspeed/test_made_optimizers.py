"""Optimizers of the section ``optimizer`` that are made of the parameters; of mup a stand-in, which groups by width."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import zoo.deepspeed as deepspeed
from zoo import sim
from zoo.config import ConfigError


class Shape:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def width_mult(self) -> float:
        return self.factor


def grouped(impl: Any) -> Any:
    def make(params: Any, **options: Any) -> torch.optim.Optimizer:
        groups = []
        for member in params:
            group = member if isinstance(member, dict) else {"params": [member]}
            for p in group["params"]:
                groups.append({**group, "params": [p], "lr": options["lr"] / p.infshape.width_mult()})
        return impl(groups, **options)  # type: ignore[no-any-return]

    return make


@pytest.fixture
def mup(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("mup")
    module.MuAdam, module.MuAdamW = grouped(torch.optim.Adam), grouped(torch.optim.AdamW)
    module.MuSGD = grouped(torch.optim.SGD)
    monkeypatch.setitem(sys.modules, "mup", module)
    return module


def model_of(*, shapes: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for i, p in enumerate(model.parameters()):
        if shapes:
            p.infshape = Shape(2.0**i)  # type: ignore[attr-defined]
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def document(kind: str, stage: int, **options: Any) -> dict[str, Any]:
    section = {"type": kind, "params": {"lr": 0.01, **options}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": section, "zero_optimization": {"stage": stage}}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["MuAdam", "MuAdamW", "MuSGD", "muadam"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_parameter_has_the_rate_of_its_width(kind: str, stage: int, mup: Any) -> None:
    plain = model_of()
    name = {"muadam": "MuAdam"}.get(kind, kind)
    optimizer = getattr(mup, name)(list(plain.parameters()), lr=0.01)
    for step in range(3):
        sum(plain(batch(rank, step)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    def fn(rank: int) -> list[torch.Tensor]:
        model = model_of()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=document(kind, stage))[0]
        for step in range(3):
            engine.backward(engine(batch(rank, step)).square().mean())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return [p.detach().clone() for p in model.parameters()]

    for found in sim.run(2, fn):
        torch.testing.assert_close(found, [p.detach() for p in plain.parameters()], rtol=1e-5, atol=1e-6)


def test_what_is_missing_is_said(mup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: Any) -> None:
        sim.run(1, lambda rank: deepspeed.initialize(model=model_of(), config=document("MuAdam", 1, **options)))

    with pytest.raises((ConfigError, sim.RankError), match=r"max_grad_norm is no option of MuAdam"):
        start(max_grad_norm=1.0)
    with pytest.raises((ConfigError, sim.RankError), match=r"optimizer.params of MuAdam: .*nonsense"):
        start(nonsense=1.0)
    bare = model_of(shapes=False)
    with pytest.raises((ConfigError, sim.RankError), match=r"set_base_shapes"):
        sim.run(1, lambda rank: deepspeed.initialize(model=bare, config=document("MuAdam", 1)))
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises((ConfigError, sim.RankError), match=r"package mup, which cannot be imported.*pip install mup"):
        start()


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("allowed", [False, True, None])
def test_an_optimizer_that_is_not_on_the_list_runs_unless_the_configuration_forbids_it(
    stage: int, allowed: bool | None
) -> None:  # fmt: skip
    def start(rank: int, make: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
        if allowed is not None:
            config["zero_allow_untested_optimizer"] = allowed
        model = model_of()
        deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)

    sim.run(1, lambda rank: start(rank, lambda params: torch.optim.AdamW(params, lr=0.1)))
    if allowed is False and stage:
        with pytest.raises(sim.RankError) as caught:
            sim.run(1, lambda rank: start(rank, lambda params: torch.optim.SGD(params, lr=0.1)))
        assert isinstance(caught.value.__cause__, AssertionError)
        assert "SGD under ZeRO stage" in str(caught.value)
    else:
        sim.run(1, lambda rank: start(rank, lambda params: torch.optim.SGD(params, lr=0.1)))


def test_a_type_that_torch_alone_has_is_torchs() -> None:
    plain = model_of()
    optimizer = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    for step in range(3):
        sum(plain(batch(rank, step)).square().mean() / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    def start(model: nn.Module, **options: Any) -> Any:
        section = {"type": "Adafactor", "params": {"lr": 0.05, **options}}
        return deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "optimizer": section})[0]

    def fn(rank: int) -> list[torch.Tensor]:
        model = model_of()
        engine = start(model)
        for step in range(3):
            engine.backward(engine(batch(rank, step)).square().mean())
            engine.step()
        return [p.detach().clone() for p in model.parameters()]

    for found in sim.run(2, fn):
        torch.testing.assert_close(found, [p.detach() for p in plain.parameters()], rtol=1e-5, atol=1e-6)
    with pytest.raises((ConfigError, sim.RankError), match=r"optimizer.params of Adafactor: .*nonsense"):
        sim.run(1, lambda rank: start(model_of(), nonsense=1))
