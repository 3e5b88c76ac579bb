"""What does not fit an engine is refused on all ranks before anything has changed; what begins anew begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zoo import sim
from zoo.checkpointing import Checkpoint, CheckpointError, DamageError
from zoo.engine import initialize


class Net(nn.Module):
    def __init__(
        self, layers: int = 3, frozen: tuple[int, ...] = (), pos: str = "", tied: bool = False, wrapped: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        for number in frozen:
            self.layers[number].requires_grad_(False)
        if pos == "parameter":
            self.pos = nn.Parameter(torch.zeros(4))
        elif pos == "buffer":
            self.register_buffer("pos", torch.zeros(4))
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        if wrapped:
            self.inner, self.layers = nn.ModuleDict({"x": self.layers}), nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (
            [*self.layers, *getattr(self, "inner", {}).get("x", [])] if hasattr(self, "inner") else self.layers
        ):
            x = torch.tanh(layer(x))
        return (x + getattr(self, "pos", 0.0)).square().sum()


def start(stage: int, optimizer: str = "AdamW", model: nn.Module | None = None, **params: Any) -> Any:
    config = {
        "train_batch_size": 2, "optimizer": {"type": optimizer, "params": {"lr": 1e-2, **params}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    return initialize(config, model if model is not None else Net())[0]


def step(engine: Any, rank: int, number: int = 0) -> float:
    dice = torch.Generator().manual_seed(10 * rank + number)
    return float(engine.train_batch(iter([torch.randn(1, 4, generator=dice)])))


def saved(folder: Path, stage: int, steps: int = 2, **options: Any) -> None:
    optimizer = options.pop("optimizer", "AdamW")

    def job(rank: int) -> None:
        engine = start(stage, optimizer, Net(**options))
        for number in range(steps):
            step(engine, rank, number)
        engine.save_checkpoint(folder, "a")
        engine.destroy()

    sim.run(2, job)


def refused(folder: Path, stage: int, said: str, optimizer: str = "AdamW", **options: Any) -> None:
    def job(rank: int) -> None:
        engine = start(stage, optimizer, Net(**options))
        first = step(engine, rank)
        before = [s.tensor.clone() for s in engine.optimizer.held_slices(owned=False)]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(folder, "a")
        after = [s.tensor for s in engine.optimizer.held_slices(owned=False)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert groups == [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.param_groups]
        assert step(engine, rank) != first  # it trains on

    sim.run(2, job)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"pos": "parameter"}, {"pos": "buffer"}, "'pos' is a buffer of the model, and a parameter of checkpoint 'a'"),
        ({"pos": "buffer"}, {"pos": "parameter"}, "'pos' is a parameter of the model, and a buffer of checkpoint 'a'"),
        ({"layers": 5}, {"layers": 2}, "has 'layers.2.bias', 'layers.2.weight', 'layers.3.bias' and 3 more, which the"),
        ({}, {"tied": True}, "has 'layers.2.weight', which the model does not have"),
        ({"tied": True}, {}, r"'layers\.2\.weight' has shape \(4, 4\); checkpoint 'a' has no such tensor"),
        ({"pos": "buffer"}, {}, "has 'pos', which the model does not have"),
        ({}, {"pos": "buffer"}, r"buffer 'pos' has shape \(4,\); checkpoint 'a' has no such tensor"),
        (
            {"optimizer": "Lion"},
            {},
            "has 'exp_avg', 'step' of .*, written by Lion; AdamW keeps",
        ),
        ({}, {"optimizer": "Lion"}, "'exp_avg_sq', 'step' of .*, written by AdamW; Lion keeps 'exp_avg', 'step' with"),
        ({}, {"optimizer": "Adagrad"}, "written by AdamW; Adagrad keeps"),
        ({}, {"optimizer": "SGD"}, "written by AdamW; SGD keeps"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    tmp_path: Path, stage: int, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    saved(tmp_path, stage, **then)
    refused(tmp_path, stage, said, **now)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("first", ["of torch", "of zoo"])
def test_an_optimizer_that_counts_no_steps_goes_on_as_one_that_does_and_back(
    tmp_path: Path, stage: int, first: str
) -> None:
    """SGD of torch keeps momentum alone, that of the configuration steps beside it."""

    def begin(kind: str) -> Any:
        if kind == "of zoo":
            return start(stage, "SGD", momentum=0.9, dampening=0.5)
        model = Net()
        config = {"train_batch_size": 2, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.5)
        return initialize(config, model, optimizer=optimizer)[0]

    def job(rank: int) -> None:
        engine = begin(first)
        for number in range(3):
            step(engine, rank, number)
        engine.save_checkpoint(tmp_path, "a")
        expected = [step(engine, rank, number) for number in range(3, 6)]
        other = begin("of zoo" if first == "of torch" else "of torch")
        step(other, rank)
        other.load_checkpoint(tmp_path, "a")
        assert [step(other, rank, number) for number in range(3, 6)] == pytest.approx(expected, rel=1e-6)

    sim.run(2, job)


@pytest.mark.parametrize("stage", [0, 2])
def test_another_class_of_optimizer_takes_the_options_that_it_has(tmp_path: Path, stage: int) -> None:
    saved(tmp_path, stage, optimizer="AdamW")

    def job(rank: int) -> None:
        engine = start(stage, "Lamb")
        keys = set(engine.optimizer.param_groups[0])
        engine.load_checkpoint(tmp_path)
        assert set(engine.optimizer.param_groups[0]) == keys
        step(engine, rank)

    sim.run(2, job)


@given(
    frozen=st.sets(st.integers(0, 2), max_size=2), stages=st.tuples(*[st.sampled_from([0, 1, 2, 3])] * 2),
    steps=st.integers(0, 2),
)  # fmt: skip
def test_a_layer_that_was_frozen_goes_on_with_states_of_zero(
    tmp_path_factory: pytest.TempPathFactory, frozen: set[int], stages: tuple[int, int], steps: int
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    saved(folder, stages[0], steps, frozen=tuple(sorted(frozen)))

    def job(rank: int) -> Any:
        engine = start(stages[1])
        engine.load_checkpoint(folder)
        states = {(s.name, s.role, s.start): s.tensor.clone() for s in engine.optimizer.state_slices()}
        numbers = dict(engine.optimizer.state_scalars())
        losses = [step(engine, rank, number) for number in range(2)]
        return states, numbers, losses

    for states, numbers, losses in sim.run(2, job):
        for (name, role, _), tensor in states.items():
            if role.startswith("exp_avg") and name.split(".")[1] in map(str, frozen):
                assert not tensor.any(), name
            elif role.startswith("exp_avg") and steps:
                assert tensor.any(), name
        assert {value for key, value in numbers.items() if key.startswith("step/")} <= {0, float(steps)}
        assert losses[0] != losses[1]


def test_what_a_part_raises_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    class Broken:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if self.rank == 1:
                raise OSError("its disk is gone")

    def job(rank: int) -> None:
        engine = start(2)
        engine.register_state("mine", Broken(rank))
        engine.save_checkpoint(tmp_path, "a")
        with pytest.raises(CheckpointError, match="rank 1: OSError: its disk is gone"):
            engine.load_checkpoint(tmp_path, "a")
        with pytest.raises(ValueError, match=r"loading the checkpoint 'a' has failed half-way\. Load another"):
            step(engine, rank)

    sim.run(2, job)


def test_a_rank_in_the_middle_of_a_step_does_not_let_the_others_wait(tmp_path: Path) -> None:
    def job(rank: int) -> None:
        engine = start(1)
        engine.backward(engine(torch.ones(1, 4)))
        if rank == 0:
            engine.zero_grad()
        with pytest.raises(CheckpointError, match=r"rank 1: ValueError: save_checkpoint\(\) in the middle of a step"):
            engine.save_checkpoint(tmp_path, "a")

    sim.run(2, job)


def test_a_rank_that_cannot_read_tells_the_others_and_damage_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 3)
    read = Checkpoint.read

    def broken(self: Checkpoint, *given: Any) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("no ring could be made")
        return read(self, *given)

    monkeypatch.setattr(Checkpoint, "read", broken)

    def job(rank: int) -> None:
        engine = start(3)
        with pytest.raises(CheckpointError, match="rank 1: RuntimeError: no ring could be made") as caught:
            engine.load_checkpoint(tmp_path)
        assert not isinstance(caught.value, DamageError)
        with pytest.raises(ValueError, match="has failed half-way"):
            step(engine, rank)

    sim.run(2, job)


@pytest.mark.parametrize("module_only", [False, True])
def test_without_strict_it_is_told_what_was_loaded(
    tmp_path: Path, module_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2, layers=4)

    def job(rank: int) -> None:
        engine = start(2, model=Net(layers=3, pos="parameter"))
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_module_only=module_only)
        other = start(2, model=Net(wrapped=True))
        with pytest.raises(CheckpointError, match="has not one of the model's parameters, such as 'inner"):
            other.load_checkpoint(tmp_path, load_module_strict=False, load_module_only=module_only)

    with caplog.at_level(logging.WARNING):
        sim.run(2, job)
    told = [r.getMessage() for r in caplog.records if "parameters are loaded" in r.getMessage()]
    assert told == [
        "of checkpoint 'a' 6 of the model's 7 parameters are loaded; not in it, and as they were: 'pos'; not in the "
        "model: 'layers.3.bias', 'layers.3.weight'."
    ]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.amax, self.history = nn.Linear(4, 4), 1.0, torch.zeros(2)

    def get_extra_state(self) -> dict[str, Any]:
        return {"amax": self.amax, "history": self.history}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.amax, self.history = state["amax"], state["history"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.amax *= 2.0
        self.history = self.history + self.amax
        return (self.layer(x) * self.amax).square().sum()


def test_extra_states_of_modules_go_with_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def job(rank: int) -> None:
        engine = start(2, model=Scaled())
        step(engine, rank)
        engine.save_checkpoint(tmp_path, "a")
        losses = [step(engine, rank, number) for number in range(2)]
        again = start(3, model=Scaled())
        again.load_checkpoint(tmp_path)
        assert (again.module.amax, again.module.history.tolist()) == (2.0, [2.0, 2.0])
        assert [step(again, rank, number) for number in range(2)] == pytest.approx(losses, rel=1e-5)

    sim.run(2, job)


def test_an_extra_state_that_is_not_there_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(0, model=Scaled())
    step(engine, 0)
    engine.save_checkpoint(tmp_path, "a", asynchronous=False)
    path = tmp_path / "a" / "manifest.json"
    assert "_extra_state" in path.read_text()
    engine.module.history = object()
    with pytest.raises(CheckpointError, match=r"meta\.model\.extra\._extra_state\.history"):
        engine.save_checkpoint(tmp_path, "b", asynchronous=False)
