"""A student with fewer layers begins with layers of its teacher."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.compression.config import ROOT, LayerReductionSection
from zoo.compression.patterns import nearest_names

_MARK = "_zoo_layer_reduction"
WHERE = f"{ROOT}.layer_reduction"


def begin_as_teacher(student: nn.Module, teacher: nn.Module, section: LayerReductionSection) -> None:
    """Layer i of the student becomes layer ``teacher_layer[i]`` of the teacher, and the modules of
    ``other_module_name`` the teacher's: parameters and buffers, by name.

    Both are whole (nothing is sharded yet). Nothing is written unless everything fits.

    Raises:
        ValueError: modules that are not there, another number of layers, tensors of another shape (a teacher of another
            width), or tensors that student and teacher have in common; the sentence names the module.
    """
    pairs: list[tuple[str, nn.Module, str, nn.Module]] = []
    if section.teacher_layer:
        prefix = section.module_name_prefix or ""
        ours = _layers(student, prefix, "student", "module_name_prefix")
        theirs = _layers(teacher, prefix, "teacher", "module_name_prefix")
        if len(ours) != len(section.teacher_layer):
            raise ValueError(
                f"{WHERE}: teacher_layer = {section.teacher_layer} names {len(section.teacher_layer)} layers, and the "
                f"student's {prefix!r} has {len(ours)}. Make the student with that number of layers, or name as many."
            )
        beyond = [number for number in section.teacher_layer if number >= len(theirs)]
        if beyond:
            raise ValueError(
                f"{WHERE}.teacher_layer: the teacher's {prefix!r} has the layers 0 to {len(theirs) - 1}, and no layer "
                f"{beyond[0]}."
            )
        for i, number in enumerate(section.teacher_layer):
            pairs.append((f"{prefix}.{i}", ours[i], f"{prefix}.{number}", theirs[number]))
    for name in section.other_module_name:
        pairs.append((name, _module(student, name, "student"), name, _module(teacher, name, "teacher")))
    copies = [copy for pair in pairs for copy in _tensors(*pair)]
    read = {id(value) for into, value in copies if into is not value}
    if any(id(into) in read for into, value in copies if into is not value):
        raise ValueError(
            f"{WHERE}: the student has layers of the teacher itself, which would be overwritten while others begin as "
            "they are. Give a teacher of its own, such as copy.deepcopy(model)."
        )
    with torch.no_grad():
        for into, value in copies:
            into.copy_(value)
    student.__dict__[_MARK] = True


def note_begun(student: nn.Module, begun: bool = True) -> None:
    """Whether it has: what wraps a student has begun with it, one that is as before has not."""
    student.__dict__[_MARK] = begun


def layers_of(model: nn.Module, prefix: str, who: str = "student") -> list[nn.Module]:
    """The modules of a list of layers, in order.

    Raises:
        ValueError: there is no list of this name.
    """
    return _layers(model, prefix, who, "module_name_prefix")


def has_begun(student: nn.Module) -> bool:
    """Whether :func:`begin_as_teacher` was called for it."""
    return bool(student.__dict__.get(_MARK))


def _tensors(ours: str, student: nn.Module, theirs: str, teacher: nn.Module) -> list[tuple[Tensor, Tensor]]:
    into, values = student.state_dict(keep_vars=True), teacher.state_dict(keep_vars=True)
    for name in sorted(into.keys() ^ values.keys()):
        who, other = ("student", "teacher") if name in into else ("teacher", "student")
        raise ValueError(
            f"{WHERE}: {ours!r} of the student is to begin as {theirs!r} of the teacher, and {name!r} is in the "
            f"{who}'s and not in the {other}'s. Both have to be layers of one kind."
        )
    for name, tensor in into.items():
        if isinstance(tensor, Tensor) and tensor.shape != values[name].shape:
            raise ValueError(
                f"{WHERE}: {ours}.{name} of the student has the shape {tuple(tensor.shape)}, and {theirs}.{name} of "
                f"the teacher {tuple(values[name].shape)}. A student has its teacher's width; only layers are fewer."
            )
    return [(tensor, values[name]) for name, tensor in into.items() if isinstance(tensor, Tensor)]


def _layers(model: nn.Module, prefix: str, who: str, key: str) -> list[nn.Module]:
    found = _module(model, prefix, who, key)
    layers = {int(name): child for name, child in found.named_children() if name.isdigit()}
    if sorted(layers) != list(range(len(layers))) or not layers:
        raise ValueError(
            f"{WHERE}.{key} = {prefix!r} is a {type(found).__name__} of the {who}, and no list of layers. Give the "
            "name of the list: 'bert.encoder.layer'."
        )
    return [layers[number] for number in range(len(layers))]


def _module(model: nn.Module, name: str, who: str, key: str = "other_module_name") -> nn.Module:
    there: dict[str, nn.Module] = dict(model.named_modules())
    if name not in there or not name:
        near = ", ".join(map(repr, nearest_names(name, [n for n in there if n])))
        raise ValueError(f"{WHERE}.{key}: the {who} has no module {name!r}; the nearest names are {near}.")
    return there[name]
