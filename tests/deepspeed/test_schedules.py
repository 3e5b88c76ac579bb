"""``deepspeed.runtime.lr_schedules``: DeepSpeed 0.19.8's rates, momenta and attributes, as numbers that it gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zoo.deepspeed as deepspeed
from zoo.config import ConfigError
from zoo.deepspeed.adapters.optimizers.schedules import OneCycle, get_lr_from_config
from zoo.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer_of(lr: Any = 0.5, groups: int = 1, cls: Any = torch.optim.SGD) -> Any:
    return cls([{"params": [nn.Parameter(torch.ones(2))], "lr": lr * (i + 1)} for i in range(groups)])


def rates(schedule: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.step()
    return found


def test_a_warm_up_without_a_maximum_rises_to_the_rate_of_each_group() -> None:
    schedule = WarmupLR(optimizer_of(groups=2), warmup_num_steps=4)
    assert (schedule.min_lrs, schedule.max_lrs) == ([0.0, 0.0], [0.5, 1.0])
    assert (schedule.warmup_num_steps, schedule.warmup_type) == (4, "log")
    expected = [[0.0, 0.0], [0.0, 0.0], [0.25, 0.5], [0.3962406251802891, 0.7924812503605781], [0.5, 1.0], [0.5, 1.0]]
    for found, wanted in zip(rates(schedule, 6), expected, strict=True):
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    "make", [WarmupLR, lambda o, **k: WarmupDecayLR(o, 9, **k), lambda o, **k: WarmupCosineLR(o, 9, **k)]
)
@pytest.mark.parametrize("steps", [None, "4", 4.0])
def test_a_warm_up_of_no_number_of_steps_is_refused(make: Any, steps: Any) -> None:
    with pytest.raises(ValueError, match=r"warmup_num_steps=.*number of steps"):
        make(optimizer_of(), warmup_num_steps=steps)


def test_attributes_of_the_schedules() -> None:
    decay = WarmupDecayLR(optimizer_of(), 10, 0.1, 0.4, 4, "linear")
    assert (decay.min_lrs, decay.max_lrs, decay.warmup_type, decay.total_num_steps) == ([0.1], [0.4], "linear", 10)
    cosine = WarmupCosineLR(optimizer_of(), 10, warmup_num_steps=4)
    assert (cosine.get_lr_ratio(), cosine.org_lrs, cosine.cos_min_ratio) == (0.0, [0.5], 0.0001)
    for _ in range(4):
        cosine.step()
    assert cosine.get_lr_ratio() == 1.0
    assert not hasattr(WarmupLR(optimizer_of()), "total_num_steps")


def test_a_cycle_without_a_second_half_is_over_at_its_top() -> None:
    schedule = OneCycle(
        optimizer_of(cls=torch.optim.Adam), 0.01, 0.1, cycle_first_step_size=3, cycle_second_step_size=0
    )
    assert [r for (r,) in rates(schedule, 6)] == pytest.approx([0.01, 0.04, 0.07, 0.01, 0.01, 0.01])
    assert schedule.get_mom() == [(0.9, 0.99)]


def test_momenta_of_a_cycle() -> None:
    schedule = OneCycle(optimizer_of(cls=torch.optim.Adam), 0.01, 0.1, cycle_first_step_size=3)
    assert (schedule.get_mom(), schedule.min_lrs, schedule.max_lrs) == ([(0.9, 0.99)], [0.01], [0.1])
    schedule.step()
    assert schedule.get_mom() == [(pytest.approx(0.8666666666666667), 0.99)]
    assert OneCycle(optimizer_of(), 0.01, 0.1, cycle_momentum=False).get_mom() is None


@pytest.mark.parametrize("make", [
    lambda o: WarmupLR(o, 0.0, 0.1, 4), lambda o: WarmupCosineLR(o, 10, warmup_num_steps=4),
    lambda o: OneCycle(o, 0.05, 0.1, cycle_first_step_size=3),
])  # fmt: skip
def test_a_rate_that_is_a_tensor_is_filled(make: Any) -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=rate)
    schedule = make(optimizer)
    for _ in range(2):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(schedule.get_lr()[0])


def test_the_rate_of_a_section_without_a_maximum_is_the_optimizers() -> None:
    assert get_lr_from_config({"type": "WarmupLR", "params": {}}) == (
        None, "WarmupLR has no warmup_max_lr: the rate is the optimizer's own",
    )  # fmt: skip


def schedule_by(section: dict[str, Any]) -> Any:
    document = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": section,
    }  # fmt: skip
    engine = deepspeed.initialize(model=nn.Linear(3, 1), config=document)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        engine.step()
    return engine.get_lr()


@pytest.mark.parametrize(("name", "options"), [
    ("StepLR", {"step_size": 1, "gamma": 0.5}), ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_lr_rate": 0.5}),
    ("OneCycle", {"cycle_min_lr": [0.01], "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_momentum": False}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "last_batch_iteration": 3}),
])  # fmt: skip
def test_numbers_of_a_schedule_that_are_written_as_text(name: str, options: dict[str, Any]) -> None:
    texts = {key: value if isinstance(value, list) else str(value) for key, value in options.items()}
    assert schedule_by({"type": name, "params": texts}) == schedule_by({"type": name, "params": options})


@pytest.mark.parametrize(("name", "options", "told"), [
    ("StepLR", {"step_size": 2, "gamma": "half"}, r"scheduler\.params\.gamma of \w+: .*number \(given 'half'\)"),
    ("StepLR", {"step_size": "soon"}, r"scheduler\.params\.step_size of \w+: .* a valid integer \(given 'soon'\)"),
    ("StepLR", {"step": 3}, r"scheduler\.params\.step of \w+: .*'step_size'"),
    ("LambdaLR", {"lr_lambda": "x"}, r"scheduler\.params of LambdaLR: 'str' object is not callable"),
    ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "mode": "odd"}, r"scheduler\.params\.mode of \w+: .*given 'odd'"),
    ("OneCycle", {"cycle_min_lr": "low", "cycle_max_lr": 1}, r"scheduler\.params\.cycle_min_lr\.float of \w+: .*'low'"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, r"cycle_first_step_size=0"),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max": 1}, r"scheduler\.params\.cycle_max of \w+: .*cycle_max_lr"),
])  # fmt: skip
def test_options_that_a_schedule_cannot_have_name_their_place(name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        schedule_by({"type": name, "params": options})
