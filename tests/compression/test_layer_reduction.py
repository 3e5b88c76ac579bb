"""A student begins as some layers of its teacher, or is told why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compression.models import WIDTH, Words, document, start, train
from torch import nn

from zoo.compression import init_compression

WHERE = "compression_training.layer_reduction"


def section(**changes: Any) -> dict[str, Any]:
    return {
        "layer_reduction": {
            "enabled": True, "keep_number_layer": 2, "module_name_prefix": "layer", "teacher_layer": [1, 3],
            "other_module_name": ["embed", "head"], **changes,
        }
    }  # fmt: skip


def test_layers_and_other_modules_begin_as_the_teachers() -> None:
    teacher, student = Words(layers=4, seed=1), Words(layers=2, seed=2)
    with torch.no_grad():
        teacher.layer[1].norm.weight.mul_(2)
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert init_compression(student, document(compression=section()), teacher_model=teacher) is student
    for ours, theirs in ((0, 1), (1, 3)):
        wanted = teacher.layer[theirs].state_dict()
        assert all(torch.equal(v, wanted[name]) for name, v in student.layer[ours].state_dict().items())
    assert torch.equal(student.embed.weight, teacher.embed.weight)
    assert student.head.weight is student.embed.weight
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    student.layer[0].up.weight.data.zero_()
    assert teacher.layer[1].up.weight.abs().sum() > 0, "copies, not views"
    engine = start(document(compression=section()), student)
    assert len(train(engine, 2)) == 2


def test_layers_of_the_teacher_itself_are_not_overwritten() -> None:
    model = Words(layers=2, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = {"compression_training": section(teacher_layer=[1, 0])}
    with pytest.raises(ValueError, match=r"the student has layers of the teacher itself.*copy\.deepcopy"):
        init_compression(model, config, teacher_model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_buffers_come_along() -> None:
    teacher = nn.Sequential(nn.BatchNorm1d(3))
    teacher(torch.randn(8, 3))
    student = nn.Sequential(nn.BatchNorm1d(3))
    options = {"teacher_layer": [], "keep_number_layer": None, "other_module_name": ["0"]}
    init_compression(student, {"compression_training": section(**options)}, teacher_model=teacher)
    assert torch.equal(student[0].running_mean, teacher[0].running_mean)


class Wide(Words):
    def __init__(self) -> None:
        super().__init__(layers=4)
        for block in self.layer:
            block.up = nn.Linear(WIDTH, 20)


@pytest.mark.parametrize(
    ("student", "teacher", "changes", "sentence"),
    [
        (Words(2), None, {}, rf"{WHERE}: enabled, and there is no teacher"),
        (Words(2), Wide(), {},
         r"layer\.0\.up\.weight of the student has the shape \(12, 8\), and layer\.1\.up\.weight of the teacher"),
        (Words(3), Words(4), {}, r"names 2 layers, and the student's 'layer' has 3"),
        (Words(2), Words(3), {}, r"teacher_layer: the teacher's 'layer' has the layers 0 to 2, and no layer 3"),
        (Words(2), Words(4), {"module_name_prefix": "layers"},
         r"module_name_prefix: the student has no module 'layers'; the nearest names are 'layer'"),
        (Words(2), Words(4), {"module_name_prefix": "embed"}, r"'embed' is a Embedding of the student, and no list of"),
        (Words(2), Words(4), {"other_module_name": ["pooler"]}, r"other_module_name: the student has no module 'p"),
        (Words(2), nn.Sequential(), {"teacher_layer": [], "keep_number_layer": None},
         r"other_module_name: the teacher has no module 'embed'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    student: nn.Module, teacher: nn.Module | None, changes: dict[str, Any], sentence: str
) -> None:
    before = {name: value.clone() for name, value in student.state_dict().items()}
    with pytest.raises(ValueError, match=sentence):
        init_compression(student, document(compression=section(**changes)), teacher_model=teacher)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_layers_of_another_kind_are_refused() -> None:
    teacher = Words(4)
    teacher.layer[1].norm = nn.Identity()
    with pytest.raises(ValueError, match=r"'layer\.0' of the student is to begin as 'layer\.1' of the teacher, and 'n"):
        init_compression(Words(2), document(compression=section()), teacher_model=teacher)
