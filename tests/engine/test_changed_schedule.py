"""Resumed with another learning-rate schedule, with one more or one less: told, and no step has a rate of neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from zoo.engine import Engine, initialize

WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 10}}}
CYCLE = {
    "scheduler": {
        "type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4}
    }
}  # fmt: skip


def begin(changes: dict[str, Any], **more: Any) -> Engine:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4, "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, **changes,
    }  # fmt: skip
    return initialize(config, torch.nn.Linear(2, 1), **more)[0]


def step(engine: Engine, count: int = 1) -> tuple[float, ...]:
    for _ in range(count):
        engine.backward(engine(torch.ones(4, 2)).square().mean())
        engine.step()
    assert engine.record is not None
    return engine.record.lr


@pytest.mark.parametrize("changes", [WARMUP, CYCLE], ids=["warmup", "cycle"])
def test_a_schedule_that_is_new_begins_with_its_own_rate(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = begin({})
    step(engine, 5)
    engine.save_checkpoint(tmp_path)
    fresh, again = begin(changes), begin(changes)
    again.load_checkpoint(tmp_path)
    assert "nothing of a learning-rate schedule" in caplog.text
    assert "begins anew, at step 5 of training" in caplog.text
    assert again.optimizer.param_groups[0]["betas"] == fresh.optimizer.param_groups[0]["betas"]
    for _ in range(3):
        assert step(again) == step(fresh)
    assert again.global_steps == 8


def test_a_schedule_that_is_gone_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(WARMUP)
    step(engine, 5)
    engine.save_checkpoint(tmp_path)
    again = begin({})
    again.load_checkpoint(tmp_path)
    assert again.get_lr() == engine.get_lr()
    assert f"there is none now: learning rates stay as they were, {engine.get_lr()[0]:g}." in caplog.text


def test_a_schedule_of_another_kind_is_refused_before_anything_has_changed(tmp_path: Path) -> None:
    torchs: dict[str, Any] = {"lr_scheduler": lambda o: lr_scheduler.StepLR(o, 3)}
    for name, one, other in (("zoo", (WARMUP, {}), ({}, torchs)), ("torch", ({}, torchs), (WARMUP, {}))):
        engine = begin(one[0], **one[1])
        step(engine, 3)
        engine.save_checkpoint(tmp_path / name)
        again = begin(other[0], **other[1])
        before = [p.detach().clone() for p in again.module.parameters()]
        with pytest.raises(ValueError, match="another kind of learning-rate schedule"):
            again.load_checkpoint(tmp_path / name)
        assert again.global_steps == 0
        assert all(torch.equal(a, b) for a, b in zip(before, again.module.parameters(), strict=True))


@pytest.mark.parametrize("value", [None, "3", -2, 1.5])
def test_a_state_without_a_step_is_refused(value: Any) -> None:
    schedule = begin(WARMUP).lr_scheduler
    with pytest.raises(ValueError, match="it is -1 or more"):
        schedule.load_state_dict({"last_batch_iteration": value})
