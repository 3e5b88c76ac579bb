"""``deepspeed.compression.compress``: ``zoo.compression`` with DeepSpeed's arguments.

``zoo.compression`` is a plug-in: it is asked for when this module is imported, which is when a program asks for a name
of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

_compression: Any = import_module("zoo.compression")

ModelT = TypeVar("ModelT", bound=nn.Module)
Document = str | Path | Mapping[str, Any]


def init_compression(model: ModelT, deepspeed_config: Document, teacher_model: Any = None, mpu: Any = None) -> ModelT:
    """See :func:`zoo.compression.init_compression`."""
    made: ModelT = _compression.init_compression(model, deepspeed_config, teacher_model, mpu)
    return made


def redundancy_clean(model: ModelT, deepspeed_config: Document, mpu: Any = None) -> ModelT:
    """See :func:`zoo.compression.redundancy_clean`."""
    made: ModelT = _compression.redundancy_clean(model, deepspeed_config, mpu)
    return made


def student_initialization(student_model: ModelT, teacher_model: nn.Module, deepspeed_config: Document) -> ModelT:
    """The student's layers begin as those of the teacher that ``compression_training.layer_reduction`` names.

    Raises:
        ValueError: the section is not enabled, or names what one of the models does not have.
    """
    compressing: Any = import_module("zoo.compression.compressing")
    section, _ = compressing.asked_for(deepspeed_config)
    if not section.layer_reduction.enabled:
        raise ValueError(
            "student_initialization: compression_training.layer_reduction is not enabled; it says which layers of the "
            'teacher the student begins with. Set "enabled", "module_name_prefix" and "teacher_layer" there.'
        )
    reduction: Any = import_module("zoo.compression.layer_reduction")
    inner = compressing.inner_of
    reduction.begin_as_teacher(inner(student_model), inner(teacher_model), section.layer_reduction)
    return student_model
