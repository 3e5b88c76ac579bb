"""Weights that are saved or loaded between two steps by which ranks agree on them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.zero.saved import collect, whole

from zoo import checkpointing, sim
from zoo.engine import Engine
from zoo.zero import ZeroOptimizer

from .test_engine import start

WAYS: dict[str, dict[str, Any]] = {
    "ZeroOneAdam": {"lr": 0.01, "var_freeze_step": 2, "local_step_scaler": 1, "local_step_clipper": 4},
    "DiLoCo": {"lr": 0.01, "sync_every": 4},
}
LOCAL = 7
"""A step after which ranks are apart."""
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": 0}}


def document(name: str) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": WAYS[name]}, "zero_optimization": {"stage": 0}}


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.train_batch()


def values(engine: Engine) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for _, value in engine.module.named_parameters()])


def threes(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 3.0) for name, value in engine.module_state_dict().items()}


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["module only", "no optimizer states", "state_dict"])
@pytest.mark.parametrize("name", WAYS)
def test_weights_loaded_between_two_agreements_are_trained_from(name: str, way: str, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        engine = start(ADAM)
        engine.load_module_state_dict(threes(engine))
        engine.save_checkpoint(tmp_path)

    def load(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        engine = start(document(name))
        train(engine, LOCAL)
        own = values(engine).clone()
        if way == "state_dict":
            engine.load_module_state_dict(threes(engine))
        else:
            given = {"load_module_only": True} if way == "module only" else {"load_optimizer_states": False}
            engine.load_checkpoint(tmp_path, **given)
        found = []
        for _ in range(6):
            found.append(values(engine).clone())
            train(engine, 1)
        return own, found

    sim.run(2, save)
    (own, one), (other, two) = sim.run(2, load)
    assert not torch.equal(own, other)
    assert bool((torch.stack([one[0], two[0]]) == 3.0).all())
    for a, b in zip(one, two, strict=True):
        assert float((a - 3.0).abs().max()) < 1.0
        assert float((b - 3.0).abs().max()) < 1.0
    assert any(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))  # they agree again


@pytest.mark.parametrize("name", WAYS)
def test_what_is_saved_between_two_agreements_is_read_as_the_mean(name: str, tmp_path: Path) -> None:
    from zoo.checkpointing.consolidation import get_fp32_state_dict_from_zero_checkpoint

    def save(rank: int) -> torch.Tensor:
        engine = start(document(name))
        train(engine, LOCAL)
        engine.save_checkpoint(tmp_path)
        return values(engine).clone()

    def load(rank: int) -> torch.Tensor:
        engine = start(ADAM)
        engine.load_checkpoint(tmp_path, load_module_only=True)
        return values(engine).clone()

    own, other = sim.run(2, save)
    assert not torch.equal(own, other)
    mean = (own + other) / 2
    assert all(torch.equal(found, mean) for found in [*sim.run(2, load), *sim.run(1, load)])
    names = [name for name, _ in start(ADAM).module.named_parameters()]
    exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert torch.equal(torch.cat([exported[name].flatten() for name in names]), mean)
    with checkpointing.load(tmp_path) as found:
        assert torch.equal(torch.cat([found.tensor(name).flatten() for name in names]), mean)


@pytest.mark.parametrize("name", WAYS)
def test_what_is_exported_between_two_agreements_is_the_mean(name: str, tmp_path: Path) -> None:
    def job(rank: int, exports: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        engine = start(document(name))
        train(engine, LOCAL)
        own, found = values(engine).clone(), list[torch.Tensor]()
        names = [n for n, _ in engine.module.named_parameters()]
        if exports:
            assert engine.save_16bit_model(tmp_path)
            written = safetensors.torch.load_file(tmp_path / "model.safetensors")
            for state in (engine.module_state_dict(), engine.optimizer.consolidated_parameters(), written):
                found.append(torch.cat([state[n].flatten() for n in names]))
        assert torch.equal(values(engine), own)
        train(engine, 3)
        return [own, values(engine).clone()], found

    ((own, one), found), ((other, two), again) = sim.run(2, functools.partial(job, exports=True))
    assert not torch.equal(own, other)
    assert all(torch.equal(state, (own + other) / 2) for state in [*found, *again])
    plain = sim.run(2, functools.partial(job, exports=False))
    assert torch.equal(plain[0][0][1], one)
    assert torch.equal(plain[1][0][1], two)


@pytest.mark.parametrize("name", WAYS)
def test_a_load_that_leaves_some_parameters_apart_is_refused(name: str) -> None:
    def job(rank: int) -> None:
        engine = start(document(name))
        train(engine, LOCAL)
        given = threes(engine)
        given.pop("first.bias")
        with pytest.raises(checkpointing.CheckpointError, match="those that stay are each rank's own"):
            engine.load_module_state_dict(given, strict=False)
        train(engine, 2)

    sim.run(2, job)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_the_groups_have_counted_goes_with_the_state(ranks: int) -> None:
    """The options of the groups that count are not the user's to carry over."""
    from zoo.optim import ZeroOneAdam

    def advance(optimizer: ZeroOptimizer, model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

    def made() -> tuple[torch.nn.Module, ZeroOptimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5))
        return model, ZeroOptimizer(model, stage=0, optimizer=ZeroOneAdam, **WAYS["ZeroOneAdam"])

    def save(rank: int) -> Any:
        model, optimizer = made()
        for step in range(LOCAL):
            advance(optimizer, model, rank, step)
        saved = collect(optimizer), optimizer.state_scalars()
        return *saved, [advance(optimizer, model, rank, LOCAL + step) for step in range(6)]

    saved = sim.run(2, save)
    state, scalars = whole([one[0] for one in saved]), {k: v for one in saved for k, v in one[1].items()}

    def load(rank: int) -> list[torch.Tensor]:
        model, optimizer = made()
        optimizer.load_state(lambda n, role, start, length: state[n, role].view(-1)[start : start + length], scalars)
        return [advance(optimizer, model, rank, LOCAL + step) for step in range(6)]

    loaded = sim.run(ranks, load)
    assert any(all(torch.equal(one[t], loaded[0][t]) for one in loaded) for t in range(6))
    if ranks == 2:
        for mine, kept in zip(loaded, saved, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, kept[2], strict=True))
