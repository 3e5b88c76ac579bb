"""Every learning-rate schedule of torch resumes exactly from an engine's checkpoint."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from zoo.engine import Engine, initialize

CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    "steps_per_print": None,
}
Make = Callable[[Any], Any]


class _Power:
    """A rate that has state, as LambdaLR takes it."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: int) -> float:
        return float(self.base**step)


class _Inverse(lr_scheduler.LRScheduler):
    """Its default state_dict() has a function."""

    def __init__(self, optimizer: Any) -> None:
        self.rate = lambda k: 0.01 / (k + 1)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [self.rate(self.last_epoch) for _ in self.optimizer.param_groups]


def _sequence(*kinds: str, then: Callable[..., Any]) -> Make:
    return lambda o: then(o, [MAKE[kind](o) for kind in kinds])


MAKE: dict[str, Make] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.5**k),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, _Power(0.9)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9 + 0.01 * k),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 6]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, 3, scale_fn=lambda x: 0.8**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, three_phase=True),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, cooldown=1, factor=0.5),
    "inverse": _Inverse,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.001, anneal_epochs=6),
    "SequentialLR": _sequence(
        "MultiStepLR", "CyclicLR", "ExponentialLR", then=lambda o, parts: lr_scheduler.SequentialLR(o, parts, [3, 6])
    ),
    "SequentialLR with functions": _sequence(
        "LambdaLR", "inverse", then=lambda o, parts: lr_scheduler.SequentialLR(o, parts, [5])
    ),
    "ChainedScheduler": _sequence(
        "MultiStepLR", "LinearLR", "ExponentialLR", then=lambda o, parts: lr_scheduler.ChainedScheduler(parts, o)
    ),
}  # fmt: skip


def _engine(kind: str, *, lr: float = 0.01) -> Engine:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    config = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.9}}}
    return initialize(config, model, lr_scheduler=MAKE[kind])[0]


def _go_on(engine: Engine, losses: list[float]) -> list[Any]:
    """The rates and momenta of the steps that follow; ``losses`` are what ReduceLROnPlateau looks at."""
    seen = []
    for loss in losses:
        if isinstance(engine.lr_scheduler, lr_scheduler.ReduceLROnPlateau):
            engine.lr_scheduler.step(loss)
        else:
            engine.lr_scheduler.step()
        seen.append([(group["lr"], group["momentum"]) for group in engine.optimizer.param_groups])
    return seen


def test_none_of_torchs_schedules_is_left_out() -> None:
    classes = [c for c in vars(lr_scheduler).values() if inspect.isclass(c) and issubclass(c, lr_scheduler.LRScheduler)]
    named = {c.__name__ for c in classes if not c.__name__.startswith("_")} - {"LRScheduler"}
    assert named <= set(MAKE)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("kind", sorted(MAKE))
def test_it_continues_with_exactly_the_same_rates(tmp_path: Path, kind: str) -> None:
    engine, before, after = _engine(kind), [1.0, 0.5, 0.6, 0.7], [0.4, 0.5, 0.5, 0.3, 0.3, 0.4]
    _go_on(engine, before)
    engine.save_checkpoint(tmp_path)
    expected = _go_on(engine, after)
    again = _engine(kind)
    again.load_checkpoint(tmp_path)
    assert _go_on(again, after) == expected
    assert len({str(rates) for rates in expected}) > 1  # otherwise this test would show nothing


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("kind", sorted(MAKE))
def test_all_of_its_state_is_the_checkpoints(tmp_path: Path, kind: str) -> None:
    """A schedule that was built with another rate is the saved one all the same."""
    engine, again = _engine(kind), _engine(kind, lr=0.02)
    _go_on(engine, [1.0, 0.5, 0.6])
    engine.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    assert _go_on(again, [0.4, 0.5]) == _go_on(engine, [0.4, 0.5])


def test_functions_are_left_out_by_name_at_every_depth(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zoo.engine"):
        _engine("SequentialLR with functions").save_checkpoint(tmp_path)
    assert "does not hold _schedulers[1].rate of the learning-rate schedule SequentialLR" in caplog.text


@pytest.mark.parametrize("stage", [0, 2])
def test_a_schedule_of_another_optimizer_is_refused(stage: int) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    makes: list[Make] = [
        lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(optimizer, 0.5)]),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)], [2]
        ),
    ]
    for make in makes:
        model = torch.nn.Linear(3, 1)
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        with pytest.raises(ValueError, match="of another optimizer, a SGD: it would move the learning rates of that"):
            initialize(config, model, lr_scheduler=make(other))
        plain = {key: value for key, value in config.items() if key != "optimizer"}
        model = torch.nn.Linear(3, 1)
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = initialize(plain, model, optimizer=other, lr_scheduler=make(other))[0]
        assert engine.lr_scheduler.optimizer.param_groups[0] is engine.optimizer.param_groups[0]
    with pytest.raises(ValueError, match=r"lr_scheduler=5 is a int; it takes a schedule, which has step\(\), or a"):
        initialize(config, torch.nn.Linear(3, 1), lr_scheduler=5)
