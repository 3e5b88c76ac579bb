"""Parts of a checkpoint: what is not wanted of it, or not in it, stays as it is, on every rank and at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_engine import BASE, Net, _train, data, stage, start
from torch import nn

from zoo import sim
from zoo.checkpointing import CheckpointError, load
from zoo.comm import CollectiveMismatchError
from zoo.engine import initialize

States = dict[tuple[str, str, int], torch.Tensor]


def states(engine: Any) -> States:
    """This rank's part, copied."""
    return {(s.name, s.role, s.start): s.tensor.detach().clone() for s in engine.optimizer.state_slices()}


def differs(found: States, expected: States, *, parameters: bool) -> list[Any]:
    """The places whose values differ, of parameters or of all else."""
    places = [place for place in expected if (place[1] == "parameter") == parameters]
    assert places
    return [place for place in places if not torch.equal(found[place], expected[place])]


def saved(rank: int, folder: Path, number: int) -> tuple[States, States, float]:
    """(of the checkpoint, of an engine that went on), and the rate of the latter."""
    engine = start(stage(number))
    _train(engine, 2)
    engine.save_checkpoint(folder)
    before = states(engine)
    _train(engine, 3)
    return before, states(engine), engine.get_lr()[0]


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["optimizer", "schedule", "module"])
def test_what_is_not_wanted_stays(tmp_path: Path, number: int, what: str) -> None:
    options = {
        "optimizer": {"load_optimizer_states": False}, "schedule": {"load_lr_scheduler_states": False},
        "module": {"load_module_only": True},
    }[what]  # fmt: skip

    def job(rank: int) -> None:
        before, _, _ = saved(rank, tmp_path / "runs", number)
        engine = start(stage(number))
        _train(engine, 5)
        mine, rate, steps = states(engine), engine.get_lr()[0], engine.global_steps
        scalars = engine.optimizer.state_scalars()
        engine.load_checkpoint(tmp_path / "runs", **options)
        now = states(engine)
        assert not differs(now, before, parameters=True)
        assert not differs(now, before if what == "schedule" else mine, parameters=False)
        assert differs(mine, before, parameters=True)
        assert differs(mine, before, parameters=False)
        assert engine.global_steps == (steps if what == "module" else 2)
        assert (engine.optimizer.state_scalars() == scalars) == (what != "schedule")
        if what != "optimizer":
            assert engine.lr_scheduler is None or (engine.get_lr()[0] == rate) == (what == "module")
        assert all(map(torch.isfinite, map(torch.tensor, _train(engine, 2))))

    sim.run(2, job)


class Longer(Net):
    """With a layer more."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.extra = nn.Linear(3, 3)
        self.register_buffer("seen", torch.ones(2))


@pytest.mark.parametrize("number", [0, 3])
def test_what_is_not_there_stays_if_that_is_wanted(tmp_path: Path, number: int) -> None:
    def job(rank: int) -> None:
        before, _, _ = saved(rank, tmp_path / "runs", number)
        torch.manual_seed(5)
        engine = initialize({**BASE, **stage(number)}, Longer(), training_data=data())[0]
        mine = states(engine)
        with pytest.raises(CheckpointError, match=r"the model's 'extra\.weight' has shape .* no such tensor"):
            engine.load_checkpoint(tmp_path / "runs")
        engine.load_checkpoint(tmp_path / "runs", load_module_strict=False)
        now = states(engine)
        whole = engine.optimizer.consolidated_parameters()
        assert {name for name, _, _ in differs(now, mine, parameters=True)}.isdisjoint({"extra.weight", "extra.bias"})
        for (name, role, begin), value in before.items():
            if role == "parameter":
                assert torch.equal(whole[name].flatten()[begin : begin + len(value)], value)
        assert engine.module.seen.tolist() == [1.0, 1.0]

    sim.run(2, job)


@pytest.mark.parametrize("number", [0, 3])
def test_frozen_parameters_may_be_left_out(tmp_path: Path, number: int) -> None:
    def made(value: float) -> Any:
        torch.manual_seed(0)
        model = Net()
        model.first.requires_grad_(False)
        with torch.no_grad():
            model.first.weight.fill_(value)
        return initialize({**BASE, **stage(number)}, model, training_data=data())[0]

    def job(rank: int) -> None:
        engine = made(0.5)
        _train(engine, 2)
        engine.save_checkpoint(tmp_path, "all")
        engine.save_checkpoint(tmp_path, "trained", exclude_frozen_parameters=True)
        expected = states(engine)
        other = made(0.25)
        with pytest.raises(CheckpointError, match=r"'first\.\w+' has shape .* no such tensor"):
            other.load_checkpoint(tmp_path, "trained")
        other.load_checkpoint(tmp_path, "trained", load_module_strict=False)
        now, frozen = states(other), other.optimizer.consolidated_parameters()["first.weight"]
        assert {name for name, _, _ in differs(now, expected, parameters=True)} <= {"first.weight"}
        assert not differs(now, expected, parameters=False)
        assert bool((frozen == 0.25).all())
        other.load_checkpoint(tmp_path, "all")
        assert bool((other.optimizer.consolidated_parameters()["first.weight"] == 0.5).all())

    sim.run(2, job)
    with load(tmp_path, "trained") as found:
        assert not any(name.startswith("first") for name in found.shapes)


def test_ranks_that_want_different_parts_are_told(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        saved(rank, tmp_path / "runs", 1)
        engine = start(stage(1))
        with pytest.raises(CollectiveMismatchError, match="load_checkpoint with"):
            engine.load_checkpoint(tmp_path / "runs", load_module_only=rank == 1)

    sim.run(2, job)
