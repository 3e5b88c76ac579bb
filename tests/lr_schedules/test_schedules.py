"""Every schedule against its formula, and against itself resumed."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.lr_schedules import peers
from tests.profiles import examples

from zoo import lr_schedules
from zoo.lr_schedules import Schedule
from zoo.registry import BuildError, Registry, build, names

PARAMS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 50, "warmup_max_lr": 0.1, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 50, "warmup_num_steps": 10, "cos_min_ratio": 0.1, "warmup_type": "linear"},
    "LRRangeTest": {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 7},
    "OneCycle": {
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 1.0,
        "cycle_first_step_size": 9,
        "decay_step_size": 2,
        "decay_lr_rate": 0.5,
    },
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


def formula(name: str, params: dict[str, Any], k: int) -> float:
    """The rate of step k (from 0), written once more; the optimizer's own rate is 0.5."""
    p = {**{f.name: f.default for f in dataclasses.fields(getattr(lr_schedules, name).Config)}, **params}
    n, j = max(2, p.get("warmup_num_steps", 2)), max(0, k - 1)
    total = p.get("total_num_steps", n)
    rise = (math.log(j + 1) / math.log(n) if p.get("warmup_type") == "log" else j / n) if j < n else 1.0
    if name == "WarmupLR" or (name == "WarmupDecayLR" and j < n):
        return p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * rise
    if name == "WarmupDecayLR":
        left = max(0.0, (total - j) / max(1, total - n))
        return p["warmup_min_lr"] + (p["warmup_max_lr"] - p["warmup_min_lr"]) * left
    if name == "WarmupCosineLR":
        if k == 0:
            return 0.0
        if j < n:
            return 0.5 * (p["warmup_min_ratio"] + (1 - p["warmup_min_ratio"]) * rise)
        angle = math.pi * min(1.0, (j - n + 1) / max(1, total - n))
        return 0.5 * (p["cos_min_ratio"] + (1 - p["cos_min_ratio"]) * (1 + math.cos(angle)) / 2)
    if name == "LRRangeTest":
        x = k / p["lr_range_test_step_size"]
        return p["lr_range_test_min_lr"] * (
            1 + p["lr_range_test_step_rate"] * (math.floor(x) if p["lr_range_test_staircase"] else x)
        )
    first = p["cycle_first_step_size"]
    second = first if p["cycle_second_step_size"] is None else p["cycle_second_step_size"]
    if k > first + second:
        i = (k - first - second) / p["decay_step_size"] if p["decay_step_size"] else 0.0
        return p["cycle_min_lr"] / (1 + p["decay_lr_rate"] * i)
    height = Fraction(k, first) if k <= first else Fraction(first + second - k, second)
    stairs = p["cycle_first_stair_count"]
    if k > first and p["cycle_second_stair_count"] is not None:
        stairs = p["cycle_second_stair_count"]
    height = Fraction(math.floor(height * stairs), stairs) if stairs else height
    return p["cycle_min_lr"] + (p["cycle_max_lr"] - p["cycle_min_lr"]) * float(height)


rates = st.floats(0, 1)
sizes = st.integers(1, 15)
OPTIONS = {
    "WarmupLR": {"warmup_min_lr": rates, "warmup_max_lr": rates, "warmup_num_steps": sizes},
    "WarmupDecayLR": {
        "total_num_steps": st.integers(17, 40), "warmup_min_lr": rates, "warmup_max_lr": rates,
        "warmup_num_steps": sizes,
    },
    "WarmupCosineLR": {
        "total_num_steps": st.integers(17, 40), "warmup_min_ratio": rates, "warmup_num_steps": sizes,
        "cos_min_ratio": rates,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": rates, "lr_range_test_step_size": sizes, "lr_range_test_step_rate": rates,
        "lr_range_test_staircase": st.booleans(),
    },
    "OneCycle": {
        "cycle_min_lr": rates, "cycle_max_lr": rates, "decay_lr_rate": rates, "cycle_first_step_size": sizes,
        "cycle_second_step_size": st.none() | sizes, "cycle_first_stair_count": st.integers(0, 3),
        "cycle_second_stair_count": st.none() | st.integers(0, 3), "decay_step_size": st.integers(0, 5),
        "cycle_min_mom": rates, "cycle_max_mom": rates, "decay_mom_rate": st.floats(0, 0.01),
    },
}  # fmt: skip


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(sorted(OPTIONS)))
    options = {key: draw(values) for key, values in OPTIONS[name].items()}
    if "warmup_num_steps" in options:
        options["warmup_type"] = draw(st.sampled_from(["log", "linear"]))
    return name, options


@examples(times=10)
@given(drawn())
def test_every_step_is_taken_with_the_rate_of_the_formula(case: tuple[str, dict[str, Any]]) -> None:
    name, params = case
    found = _rates(build("lr_schedule", name, params, optimizer=_optimizer()), 45)
    assert found == pytest.approx([formula(name, params, k) for k in range(45)], rel=1e-12, abs=1e-15)


def flat(used: list[list[list[float]]]) -> list[float]:
    return [value for step in used for group in step for value in group]


PEERS = json.loads(peers.FILE.read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", PEERS, ids=lambda case: case["name"])
def test_the_rates_and_momenta_are_those_of_deepspeed(case: dict[str, Any]) -> None:
    found = peers.used(lr_schedules, case["name"], case["params"])
    assert flat(found) == pytest.approx(flat(case["used"]), rel=1e-12)


def test_what_is_kept_of_deepspeed_is_complete() -> None:
    assert [(case["name"], case["params"]) for case in PEERS] == peers.CASES
    assert {name for name, _ in peers.CASES} == set(names("lr_schedule"))


@pytest.mark.slow
@examples(times=0.5)
@given(drawn())
def test_drawn_schedules_are_those_of_deepspeed(case: tuple[str, dict[str, Any]]) -> None:
    """Up to the documented end; where the package is installed (the extra "bench")."""
    theirs = pytest.importorskip("deepspeed.runtime.lr_schedules")
    name, params = case
    steps = params.get("total_num_steps", 40) + 1
    found, expected = (peers.used(module, name, params, steps) for module in (lr_schedules, theirs))
    assert flat(found) == pytest.approx(flat(expected), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_the_documented_constructor(name: str) -> None:
    """Options in their documented order or by name, with plain torch."""
    cls, options = getattr(lr_schedules, name), PARAMS[name]
    defaults = {f.name: options.get(f.name, f.default) for f in dataclasses.fields(cls.Config)}
    for made in (
        cls(_optimizer(), **options),
        cls(_optimizer(), *defaults.values()),
        cls(_optimizer(), *defaults.values(), -1),
    ):
        assert _rates(made, 30) == _rates(_make(name, _optimizer()), 30)
    shown = inspect.signature(cls)
    assert [*shown.parameters] == ["optimizer", *defaults, "last_batch_iteration"]
    shown.bind(_optimizer(), **options, last_batch_iteration=3)


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_it_begins_in_the_middle(name: str) -> None:
    straight = _make(name, _optimizer())
    expected = _rates(straight, 30)
    cls, optimizer = getattr(lr_schedules, name), _optimizer()
    optimizer.param_groups[0].update(lr=0.125, initial_lr=0.5)  # as it was left by the run before
    again = cls(optimizer, last_batch_iteration=11, **PARAMS[name])
    assert again.get_lr() == again.get_last_lr() == [expected[12]]
    assert again.last_batch_iteration == 11
    assert _rates(again, 18) == expected[12:]
    again.step(4)
    assert again.get_last_lr() == [expected[5]]
    again.load_state_dict({"last_batch_iteration": 6})
    assert again.get_last_lr() == [expected[7]]
    with pytest.raises(ValueError, match="last_batch_iteration=-2"):
        cls(_optimizer(), last_batch_iteration=-2, **PARAMS[name])


def test_a_constructor_of_ones_own_is_used() -> None:
    class Half(Schedule):
        @dataclasses.dataclass(frozen=True)
        class Config:
            share: float = 0.5

        def __init__(self, config: Config, *, optimizer: Any) -> None:
            self.share = config.share
            super().__init__(optimizer, config.share)

        def rate(self, step: int, group: int) -> float:
            return self.base_rates[group] * self.share

    registry = Registry({"lr_schedule": {"Half": Half}})
    assert registry.build("lr_schedule", "half", {"share": 0.25}, optimizer=_optimizer()).get_last_lr() == [0.125]


def test_momentum_cycles_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    options = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    parameter = torch.nn.Parameter(torch.zeros(1))
    momenta = []
    for optimizer in (torch.optim.SGD([parameter], 0.1, momentum=0.5), torch.optim.Adam([parameter], betas=(0.5, 0.7))):
        schedule = lr_schedules.OneCycle(optimizer, **options)
        group, seen = optimizer.param_groups[0], []
        for _ in range(12):
            seen.append(group["momentum"] if "momentum" in group else group["betas"][0])
            assert group.get("betas", (0, 0.7))[1] == 0.7
            schedule.step()
        momenta.append(seen)
    expected = [0.8, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9, 0.9]
    assert momenta[0] == momenta[1] == pytest.approx(expected)
    assert not caplog.records
    without = torch.optim.Adagrad([parameter])
    lr_schedules.OneCycle(without, **options)
    assert "cycles the learning rate only: groups of Adagrad have neither" in caplog.text
    caplog.clear()
    lr_schedules.OneCycle(without, cycle_momentum=False, **options)
    assert not caplog.records


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


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_a_group_that_comes_later_follows_and_is_resumed(name: str) -> None:
    optimizer, both = _optimizer(0.5), _optimizer(0.5, 0.25)
    schedule, wanted = _make(name, optimizer), _make(name, both)
    for _ in range(3):
        schedule.step()
        wanted.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.25})
    assert schedule.get_lr() == wanted.get_lr()
    for _ in range(9):
        schedule.step()
        wanted.step()
    assert schedule.get_last_lr() == wanted.get_last_lr()
    assert schedule.state_dict() == wanted.state_dict()
    again = _make(name, fresh := _optimizer(0.5))
    fresh.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.125})
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr()


def test_a_list_has_no_value_for_a_group_that_comes_later() -> None:
    schedule = _make("WarmupLR", optimizer := _optimizer(0.5, 0.5), warmup_max_lr=[0.1, 0.2])
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"got 2 values for warmup_max_lr; the optimizer has 3 parameter groups"):
        schedule.step()


def test_a_value_for_each_group() -> None:
    schedule = _make("WarmupLR", _optimizer(0.5, 0.5), warmup_max_lr=[0.1, 0.2])
    for _ in range(11):
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
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0"),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2]}, "2 values for lr_range_test_min_lr"),
        ("OneCycle", {"cycle_second_step_size": -1}, "cycle_second_step_size=-1"),
        ("OneCycle", {"cycle_max_mom": [0.1, 0.2]}, "2 values for cycle_max_mom"),
        ("OneCycle", {"decay_lr_rate": -1.0}, "decay_lr_rate=-1.0; it must be at least 0"),
        ("WarmupCosineLR", {"warmup_min_ratio": [0.1, 0.2]}, "2 values for warmup_min_ratio"),
        ("WarmupCosineLR", {"warmup_min_ratio": [1.5]}, "warmup_min_ratio=[1.5]; it lies between 0 and 1"),
        *(
            (name, {option: value}, f"{name} got {option}={value}; it takes finite numbers")
            for name, option in {
                "WarmupLR": "warmup_max_lr",
                "WarmupDecayLR": "warmup_min_lr",
                "WarmupCosineLR": "cos_min_ratio",
                "LRRangeTest": "lr_range_test_step_rate",
                "OneCycle": "cycle_max_lr",
            }.items()
            for value in (math.nan, math.inf, -math.inf, *([[math.nan]] if option.endswith("lr") else []))
        ),
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


def test_a_ratio_for_each_group() -> None:
    optimizer = _optimizer(0.5, 0.5)
    schedule = _make("WarmupCosineLR", optimizer, warmup_min_ratio=[0.2, 0.4], warmup_num_steps=4)
    schedule.step()
    assert schedule.get_lr() == schedule.get_last_lr() == [0.5 * 0.2, 0.5 * 0.4]
    for _ in range(4):
        schedule.step()
    assert schedule.get_lr()[0] == schedule.get_lr()[1]
