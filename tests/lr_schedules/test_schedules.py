"""Every schedule against its formula, and against itself resumed."""

from __future__ import annotations

import json
import math

import pytest
import torch

from zoo.lr_schedules import Schedule
from zoo.registry import BuildError, build, names

PARAMS = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 50, "warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 50, "warmup_num_steps": 10, "cos_min_ratio": 0.1, "warmup_type": "linear"},
}


def _optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (0.5,)]
    return torch.optim.SGD(groups, lr=0.5)


def _make(name: str, optimizer: torch.optim.Optimizer, **changes: object) -> Schedule:
    schedule: Schedule = build("lr_schedule", name, {**PARAMS[name], **changes}, optimizer=optimizer)
    return schedule


def _rates(schedule: Schedule, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    return found


def test_all_registered_schedules_are_tested() -> None:
    assert set(names("lr_schedule")) == set(PARAMS)


def test_warmup_rises_and_stays() -> None:
    rates = _rates(_make("WarmupLR", _optimizer()), 30)
    expected = [0.01 + 0.09 * min(1.0, k / 10) for k in range(30)]
    assert rates == pytest.approx(expected, rel=1e-12)


def test_warmup_in_logarithms() -> None:
    rates = _rates(_make("WarmupLR", _optimizer(), warmup_type="log", warmup_min_lr=0.0), 12)
    assert rates == pytest.approx([0.1 * min(1.0, math.log(k + 1) / math.log(10)) for k in range(12)], rel=1e-12)


def test_decay_falls_to_the_minimum_and_not_below() -> None:
    rates = _rates(_make("WarmupDecayLR", _optimizer()), 60)
    assert rates[10] == pytest.approx(0.1)
    assert rates[30] == pytest.approx(0.05)
    assert rates[50:] == [0.0] * 10


def test_cosine_is_of_the_optimizers_rate_and_stays_down() -> None:
    rates = _rates(_make("WarmupCosineLR", _optimizer()), 60)
    assert rates[5] == pytest.approx(0.25)
    for k in range(10, 50):
        expected = 0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (k - 9) / 40)))
        assert rates[k] == pytest.approx(expected, rel=1e-12)
    assert rates[49:] == pytest.approx([0.05] * 11)


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_resuming_is_never_having_stopped(name: str) -> None:
    straight = _rates(_make(name, _optimizer()), 40)
    first = _make(name, _optimizer())
    head = _rates(first, 17)
    second = _make(name, _optimizer())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + _rates(second, 23) == straight


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_every_group_gets_its_rate(name: str) -> None:
    optimizer = _optimizer(0.5, 0.25)
    schedule = _make(name, optimizer)
    for _ in range(12):
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [schedule.rate(12, 0), schedule.rate(12, 1)]


def test_a_value_for_each_group() -> None:
    schedule = _make("WarmupLR", _optimizer(0.5, 0.5), warmup_max_lr=[0.1, 0.2])
    for _ in range(10):
        schedule.step()
    assert schedule.get_last_lr() == [0.1, 0.2]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("WarmupLR", {"warmup_type": "square"}, "'log' and 'linear'"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps=-1"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, "2 values for warmup_max_lr"),
        ("WarmupLR", {"warmup_maximum": 1}, "warmup_max_lr"),
        ("WarmupDecayLR", {"total_num_steps": 0}, "total_num_steps=0"),
        ("WarmupCosineLR", {"cos_min_ratio": 2.0}, "cos_min_ratio=2.0"),
    ],
)
def test_errors_name_what_is_wrong(name: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        _make(name, _optimizer(), **changes)
    assert said in str(caught.value)


def test_the_total_must_be_given() -> None:
    with pytest.raises(BuildError, match="total_num_steps"):
        build("lr_schedule", "WarmupDecayLR", {}, optimizer=_optimizer())


def test_a_state_of_other_groups_is_refused() -> None:
    state = _make("WarmupLR", _optimizer(0.5, 0.5)).state_dict()
    with pytest.raises(ValueError, match="2 parameter groups"):
        _make("WarmupLR", _optimizer()).load_state_dict(state)
