"""Compression and curricula under DeepSpeed's names."""

from __future__ import annotations

import pytest
import torch
from tests.compression.models import Words, document
from tests.compression.test_layer_reduction import section
from zoo.deepspeed.compression.compress import init_compression, redundancy_clean, student_initialization
from zoo.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from zoo.deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

from zoo import compression

QUANTIZE = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0},
        "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["layer"]}},
    }
}


def test_a_model_is_compressed_and_cleaned_as_by_zoo() -> None:
    config = document(compression=QUANTIZE)
    made, expected = Words(layers=2, seed=1), Words(layers=2, seed=1)
    before = made.layer[0].up.weight.clone()
    assert init_compression(made, config) is made
    compression.init_compression(expected, config)
    assert len(compression.transforms_of(made)) == len(compression.transforms_of(expected)) > 0
    for model in (made, expected):
        compression.CompressionScheduler(model).set_step(1)
    assert redundancy_clean(made, config) is made
    compression.redundancy_clean(expected, config)
    assert not compression.transforms_of(made)
    assert not torch.equal(made.layer[0].up.weight, before)
    assert all(map(torch.equal, made.state_dict().values(), expected.state_dict().values()))
    with pytest.raises(ValueError, match="mpu"):
        init_compression(Words(layers=2), config, mpu=object())


def test_a_student_begins_as_its_teacher_alone_and_with_init_compression() -> None:
    config = document(compression=section())
    teacher = Words(layers=4, seed=1)
    one, other = Words(layers=2, seed=2), Words(layers=2, seed=2)
    assert student_initialization(one, teacher, config) is one
    assert torch.equal(one.layer[1].up.weight, teacher.layer[3].up.weight)
    init_compression(other, config, teacher_model=teacher)
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    with pytest.raises(ValueError, match="layer_reduction is not enabled"):
        student_initialization(one, teacher, document(compression=QUANTIZE))


def test_modules_are_found_and_set_by_path() -> None:
    model = Words(layers=2)
    assert recursive_getattr(model, "layer.1.up") is model.layer[1].up
    recursive_setattr(model, "layer.1.up", model.layer[0].up)
    assert model.layer[1].up is model.layer[0].up


# Steps 0, 1, 2, 3, 4, 6, 7, 9, 10 and 11 of DeepSpeed 0.19.8.
STEPS = (0, 1, 2, 3, 4, 6, 7, 9, 10, 11)
SCHEDULES = {
    "fixed_linear": (
        {"total_curriculum_step": 10, "difficulty_step": 8}, [8, 8, 16, 24, 24, 40, 40, 56, 64, 64]
    ),
    "fixed_root": (
        {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2}, [8, 24, 32, 32, 40, 48, 48, 56, 64, 64]
    ),
    "fixed_discrete": (
        {"difficulty": [8, 16, 64], "max_step": [3, 6]}, [8, 8, 8, 8, 16, 16, 64, 64, 64, 64]
    ),
}  # fmt: skip
LIMITS = {"min_difficulty": 8, "max_difficulty": 64}


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_a_curriculum_has_the_difficulties_of_deepspeed(kind: str) -> None:
    options, expected = SCHEDULES[kind]
    scheduler = CurriculumScheduler({**LIMITS, "schedule_type": kind, "schedule_config": options})
    assert [scheduler.get_difficulty(step) for step in STEPS] == expected
    assert scheduler.state["current_difficulty"] == 8
    assert [scheduler.update_difficulty(step) for step in STEPS] == expected
    assert scheduler.update_difficulty(1) == 64, "what was reached stays"
    assert scheduler.state["schedule_config"] == options


def test_a_curriculum_of_the_programs_own_stays_within_its_limits() -> None:
    scheduler = CurriculumScheduler({**LIMITS, "schedule_type": "custom"})
    with pytest.raises(ValueError, match="call set_custom_get_difficulty"):
        scheduler.get_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 8 * step)
    assert scheduler.update_difficulty(3) == 24
    with pytest.raises(ValueError, match="returned 0 for step 0"):
        scheduler.get_difficulty(0)
    with pytest.raises(ValueError, match="'schedule_type' is missing"):
        CurriculumScheduler(LIMITS)
    options = {"schedule_type": "fixed_linear", "schedule_config": SCHEDULES["fixed_linear"][0]}
    with pytest.raises(ValueError, match="say 'custom' there"):
        CurriculumScheduler({**LIMITS, **options}).set_custom_get_difficulty(len)
