"""Curriculum by sequence length: schedules, what is cut, what the model sees."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data_efficiency.tiny import Tiny, data, stage, start, weights
from tests.profiles import examples
from torch import nn

from zoo import sim
from zoo.config import ConfigError
from zoo.data_efficiency.schedules import build_schedule, checked
from zoo.data_efficiency.sequence import Cutter, sequence_dims

LINEAR: dict[str, Any] = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 8,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
}  # fmt: skip


@examples(times=10)
@given(st.data())
def test_fixed_root_and_linear_are_their_formula(draw: st.DataObject) -> None:
    low = draw.draw(st.integers(1, 100))
    high = draw.draw(st.integers(low, 2000))
    total, multiple, root = (draw.draw(st.integers(1, n)) for n in (500, 16, 4))
    config = {"total_curriculum_step": total, "difficulty_step": multiple}
    rooted = build_schedule("fixed_root", {**config, "root_degree": root}, low=low, high=high)
    linear = build_schedule("fixed_linear", config, low=low, high=high)
    assert rooted is not None
    assert linear is not None
    steps = range(1, total + 3)
    for schedule, degree in ((rooted, root), (linear, 1)):
        values = [schedule(step) for step in steps]
        assert values == sorted(values)
        assert values[-1] == values[total - 1] == high
        for step, value in zip(steps, values, strict=True):
            exact = min(1.0, (step / total) ** (1 / degree)) * (high - low) + low
            assert low <= value <= math.floor(exact + 1e-9)
            assert value in (low, high) or (value % multiple == 0 and value > exact - multiple - 1e-9)


def test_a_known_schedule() -> None:
    linear = build_schedule("fixed_linear", {"total_curriculum_step": 10, "difficulty_step": 8}, low=8, high=64)
    assert linear is not None
    assert [linear(step) for step in (1, 2, 5, 9, 10, 99)] == [8, 16, 32, 56, 64, 64]
    rooted = build_schedule(
        "fixed_root", {"total_curriculum_step": 100, "difficulty_step": 8, "root_degree": 2}, low=8, high=64
    )
    assert rooted is not None
    assert [rooted(step) for step in (1, 4, 25, 50, 100)] == [8, 16, 32, 40, 64]
    discrete = build_schedule("fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [5, 10]}, low=1, high=3)
    assert discrete is not None
    assert [discrete(step) for step in (1, 5, 6, 10, 11, 50)] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schedule_type": "fixed_cubic"}, "schedule_type"),
        ({"schedule_config": {"total_curriculum_step": 6}}, "lacks 'difficulty_step'"),
        ({"schedule_config": {"total_curriculum_step": 6, "difficulty_step": 0}}, "difficulty_step = 0"),
        ({"schedule_config": {"total_curriculum_step": 6.5, "difficulty_step": 1}}, "whole numbers"),
        ({"schedule_config": {"total_curriculum_step": 6, "difficulty_step": 1, "root": 2}}, "unknown key 'root'"),
        ({"min_difficulty": 9}, "min_difficulty = 9 and max_difficulty = 8"),
        ({"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [2], "max_step": [1]}}, "one max_step"),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [9], "max_step": []}},
            "difficulty has 9",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [2, 3, 4], "max_step": [4, 4]}},
            "each step is later",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start({"curriculum_learning": {**LINEAR, **changes}})


# -- what is cut ------------------------------------------------------------------------------------------------------


def test_which_dimensions_hold_sequences() -> None:
    ids = torch.zeros(3, 6, dtype=torch.long)
    assert sequence_dims(ids, 6, 1) == (1,)
    assert sequence_dims(torch.zeros(3, 6, 6, dtype=torch.bool), 6, 1) == (1, 2)
    assert sequence_dims(torch.zeros(3, 1, 6, 6), 6, 1) == (2, 3)
    assert sequence_dims(torch.zeros(3, 1, 1, 6), 6, 1) == (3,)
    assert sequence_dims(torch.zeros(3, 6, 6), 6, 1) == (1,)  # six features are no sequence
    assert sequence_dims(torch.zeros(6, dtype=torch.long), 6, 1) == ()
    assert sequence_dims(torch.zeros(3, 5, dtype=torch.long), 6, 1) == ()


def test_truncation_and_reshaping() -> None:
    ids = torch.arange(14).reshape(2, 7)
    mask = torch.ones(2, 1, 7, 7)
    labels = torch.arange(7)
    args, kwargs = Cutter().truncate((ids, {"deep": [ids + 1]}), {"mask": mask, "labels": labels}, 3)
    assert args[0].tolist() == [[0, 1, 2], [7, 8, 9]]
    assert args[1]["deep"][0].tolist() == [[1, 2, 3], [8, 9, 10]]
    assert kwargs["mask"].shape == (2, 1, 3, 3)
    assert kwargs["labels"] is labels
    (reshaped, features), _ = Cutter().reshape((ids, torch.ones(2, 7, 4)), {}, 3)
    assert reshaped.tolist() == [[0, 1, 2], [3, 4, 5], [7, 8, 9], [10, 11, 12]]
    assert features.shape == (4, 3, 4)
    with pytest.raises(ValueError, match="Use truncate"):
        Cutter().reshape((ids, mask), {}, 3)
    for of_samples in (torch.arange(2), torch.ones(2, 5)):
        with pytest.raises(ValueError, match=r"makes more samples of 2, and a tensor \(2,.*Use truncate"):
            Cutter().reshape((ids,), {"labels": of_samples}, 3)
        (cut,), same = Cutter().reshape((ids,), {"labels": of_samples}, 4)  # as many samples as before
        assert cut.shape == (2, 4)
        assert same["labels"] is of_samples
    with pytest.raises(ValueError, match="no integer tensor"):
        Cutter().truncate((torch.ones(2, 7),), {}, 3)
    assert Cutter().truncate((ids,), {}, 7)[0][0] is ids


def test_tensors_may_be_named() -> None:
    ids, square = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, 6)
    cutter = Cutter(tensors={"0": [1], "square": [1, 2]})
    args, kwargs = cutter.truncate((ids, ids), {"square": square}, 4)
    assert (args[0].shape, args[1].shape, kwargs["square"].shape) == ((2, 4), (2, 6), (2, 4, 4))
    with pytest.raises(ValueError, match="names 'sqare'"):
        Cutter(tensors={"sqare": [1]}).truncate((ids,), {}, 4)
    with pytest.raises(ValueError, match=r"names dimension 2 of a tensor \(2, 6\); give dimensions from 1 to 1"):
        Cutter(tensors={"0": [1, 2]}).truncate((ids,), {}, 4)
    for dim in (0, -1):  # dimension 0 is that of samples
        with pytest.raises(ConfigError, match=r"curriculum_learning\.tensors"):
            start({"curriculum_learning": {**LINEAR, "tensors": {"0": [dim]}}})


# -- in training ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_the_model_sees_the_lengths_of_the_schedule(draw: st.DataObject) -> None:
    low = draw.draw(st.integers(1, 8))
    high = draw.draw(st.integers(low, 10))
    config = {"total_curriculum_step": draw.draw(st.integers(1, 6)), "difficulty_step": draw.draw(st.integers(1, 3))}
    section = {**LINEAR, "min_difficulty": low, "max_difficulty": high, "schedule_config": config}
    schedule = build_schedule("fixed_linear", config, low=low, high=high)
    assert schedule is not None
    engine = start({"curriculum_learning": section, "gradient_accumulation_steps": 2}, layers=1)
    for step in range(1, 6):
        engine.module.lengths.clear()
        engine.train_batch()
        assert engine.record is not None
        assert engine.module.lengths == [min(8, schedule(step))] * 2
        assert engine.record.metrics["curriculum_learning/seqlen"] == schedule(step)
        assert engine.record.tokens == 4 * min(8, schedule(step))
    engine.eval_batch(data()[:4])
    assert engine.module.lengths[-1] == 8


@pytest.mark.parametrize("number", [0, 3])
def test_ranks_and_resuming(number: int, tmp_path: Path) -> None:
    changes = {"curriculum_learning": LINEAR, **stage(number)}

    def job(rank: int) -> tuple[list[int], list[float], list[float], bool]:
        engine = start(changes)
        losses = [float(engine.train_batch()) for _ in range(3)]
        engine.save_checkpoint(tmp_path)
        losses += [float(engine.train_batch()) for _ in range(3)]
        again = start(changes)
        again.load_checkpoint(tmp_path)
        more = [float(again.train_batch()) for _ in range(3)]
        one, other = weights(engine), weights(again)
        return engine.module.lengths, losses[3:], more, all(torch.equal(one[n], other[n]) for n in one)

    for lengths, losses, more, same in sim.run(2, job):
        assert lengths == [2, 4, 4, 6, 6, 8]
        assert losses == more
        assert same


def test_at_the_highest_difficulty_nothing_changes() -> None:
    def run(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = start(changes)
        for _ in range(3):
            engine.train_batch()
        return weights(engine)

    plain = run({})
    for high in (8, 100):
        section = {**LINEAR, "min_difficulty": high, "max_difficulty": high}
        changed = run({"curriculum_learning": section})
        assert all(torch.equal(plain[name], changed[name]) for name in plain)


def test_reshaping_keeps_the_tokens() -> None:
    section = {**LINEAR, "apply": "reshape", "min_difficulty": 4, "max_difficulty": 4}
    engine = start({"curriculum_learning": section}, layers=1)
    engine.train_batch()
    assert engine.record is not None
    assert (engine.record.tokens, engine.record.samples, engine.module.lengths) == (32, 8, [4])


def test_a_model_may_cut_itself() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tiny(1)
            self.told: list[int] = []

        def forward(self, x: torch.Tensor, y: torch.Tensor, curriculum_seqlen: int = 8) -> torch.Tensor:
            self.told.append(curriculum_seqlen)
            loss: torch.Tensor = self.model(x[:, :curriculum_seqlen], y[:, :curriculum_seqlen])
            return loss

    engine = start({"curriculum_learning": LINEAR}, model=Own())
    for _ in range(3):
        engine.train_batch()
    assert engine.module.told == engine.module.model.lengths == [2, 4, 4]


@pytest.mark.parametrize("value", [np.int64(4), torch.tensor(4), 4])
def test_a_custom_schedule_returns_whole_numbers_of_any_kind(value: Any) -> None:
    assert type(checked(value, 2, 8, 1)) is int
    assert checked(value, 2, 8, 1) == 4


@pytest.mark.parametrize("value", [4.0, np.float64(4), True, None, "4", 9, np.int64(1), torch.tensor(4.0)])
def test_and_nothing_else(value: Any) -> None:
    with pytest.raises(ValueError, match="it returns a whole number between min_difficulty 2 and max_difficulty 8"):
        checked(value, 2, 8, 1)


def test_a_custom_schedule() -> None:
    section = {"enabled": True, "min_difficulty": 1, "max_difficulty": 8, "schedule_type": "custom"}
    engine = start({"curriculum_learning": section}, layers=1)
    with pytest.raises(ValueError, match="no schedule is set"):
        engine.train_batch()
    engine.zero_grad()
    part = engine.parts["curriculum_learning"]
    part.set_schedule(lambda step: 9 - step)
    for _ in range(2):
        engine.train_batch()
    assert engine.module.lengths == [8, 7]
    part.set_schedule(lambda step: 9)
    with pytest.raises(ValueError, match="returned 9 for step 3"):
        engine.train_batch()
    with pytest.raises(ValueError, match='is for "schedule_type": "custom"'):
        start({"curriculum_learning": LINEAR}).parts["curriculum_learning"].set_schedule(lambda step: 1)
