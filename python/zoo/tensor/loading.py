"""Each rank reads its own boxes into a split model, and nobody holds the whole one.

    with parameters_on_meta():
        model = LlamaForCausalLM(config)
    split(model, plan, mesh)
    with load_safetensors(folder) as source:     # or any checkpoint of zoo.checkpointing
        load(model, source)

What is read is whatever parameters say they are (``zoo.layout.declare_split``), so any degree reads what any other
wrote.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zoo.comm import Communicator
from zoo.layout import Box, Boxes, StateSlice, boxes_of, logical_name, split_of
from zoo.nn import PackedLinear
from zoo.nn.packed import shares_elements
from zoo.tensor.agreement import all_or_none
from zoo.tensor.layers import part_of

_PIECE_BYTES = 4 << 20
_VALUES = ("parameter", "buffer", "master")
"""Roles whose elements are the tensor's own values, and not what an optimizer knows of it."""
_CODES = (
    "{} is of a layer in codes (zoo.nn.pack_linears), which are no part of a whole tensor: load and save before "
    "packing, or each rank its own state_dict()"
)


class Source(Protocol):
    """A checkpoint that reads boxes of whole tensors: zoo's own, or what the readers of zoo.checkpointing open."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    @property
    def roles(self) -> Mapping[str, Mapping[str, str]]: ...
    def read_box(self, name: str, role: str, box: Box) -> torch.Tensor: ...


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """What this thread makes in the block has parameters without memory; buffers have theirs.

    A parameter is made and given up at once, before anything is written to it by ``reset_parameters``; so no whole
    tensor takes memory, where layers make theirs with ``torch.empty``.
    """
    thread = threading.get_ident()

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread or parameter.is_meta:
            return None
        found = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        found.__dict__.update(parameter.__dict__)
        return found

    hook: Any = moved
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass
class _Wanted:
    """A tensor of the model, under all of its names, and where modules have it. is_coded: it has codes, or is of
    them."""

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    role: str
    is_coded: bool
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


def load(
    model: nn.Module, source: Source, *, comm: Communicator | None = None, strict: bool = True,
    rename: Callable[[str], str] | None = None, device: torch.device | str = "cpu",
) -> list[str]:  # fmt: skip
    """Fill a model, split or not, from whole tensors. Collective over the ranks of its axis, or ``comm``.

    Args:
        model: with values, which are written over, or on the meta device.
        source: names are those of the model; where all of them lack its ``base_model_prefix``, or have it and the model
            does not, that is taken into account.
        comm: ranks that load together; by default those that have parts of the model. A failure on one is raised on
            all; of what does not fit, before any of them has changed.
        strict: the source has every tensor of the model and no other. False: what is missing stays as it was.
        rename: from a name in the source to one of the model.
        device: where parameters on the meta device get their memory.

    Returns:
        Names that the source has and the model does not; empty if ``strict``.

    Raises:
        ValueError: tensors that are missing, not known or of another shape, two of one name, or buffers that nothing
            would fill; before anything was changed.
    """

    def check() -> tuple[list[tuple[_Wanted, str]], list[str]]:
        _check_buffers(model)
        return _matched(model, _wanted(model), source, strict=strict, rename=rename)

    comm = _comm_of(model) if comm is None else comm
    matched, unused = all_or_none(comm, "loading a split model", check)

    def fill() -> None:
        for want, name in matched:
            _fill(want, source, name, torch.device(device))

    all_or_none(comm, "reading its tensors", fill)
    return unused


def _check_buffers(model: nn.Module) -> None:
    """Raise ValueError where a forward would meet one without values."""
    empty = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if empty:
        raise ValueError(
            f"the model has {len(empty)} buffers on the meta device that no checkpoint has: {', '.join(empty[:5])}. "
            "Make it in zoo.tensor.parameters_on_meta(), which leaves buffers their values, or fill them first. "
            "Nothing was changed."
        )


def _comm_of(model: nn.Module) -> Communicator | None:
    """Of the ranks that have its parts; None where it is whole."""
    return next((part.region.comm for module in model.modules() if (part := part_of(module)) is not None), None)


def _wanted(model: nn.Module) -> list[_Wanted]:
    found: dict[int, _Wanted] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = [(name, p, "parameter") for name, p in module._parameters.items()]
        skipped = module._non_persistent_buffers_set
        own += [(name, b, "buffer") for name, b in module._buffers.items() if name not in skipped]
        for name, tensor, role in own:
            if tensor is None:
                continue
            whole = split_of(tensor).shape or tuple(tensor.shape)
            codes = isinstance(module, PackedLinear) and role == "buffer"
            want = found.setdefault(id(tensor), _Wanted([], tensor, whole, role, codes))
            want.names.append(logical_name(model, f"{path}.{name}" if path else name))
            if (module, name) not in want.places:
                want.places.append((module, name))
    return list(found.values())


def _matched(
    model: nn.Module, wanted: list[_Wanted], source: Source, *, strict: bool, rename: Callable[[str], str] | None
) -> tuple[list[tuple[_Wanted, str]], list[str]]:
    of_model = {name: want for want in wanted for name in want.names}
    names = {there: rename(there) if rename else there for there in source.shapes}
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    if not any(name.startswith(prefix) for name in names.values()) and len(prefix) > 1:
        names = {there: name if name in of_model else prefix + name for there, name in names.items()}
    elif len(prefix) > 1 and not any(name.startswith(prefix) for name in of_model):
        names = {there: name.removeprefix(prefix) for there, name in names.items()}
    given: dict[str, str] = {}
    for there, name in names.items():
        if given.setdefault(name, there) != there:
            raise ValueError(f"{given[name]} and {there} are both {name} of the model. Nothing was changed.")
    matched: list[tuple[_Wanted, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    for want in wanted:
        found = next((given[name] for name in want.names if name in given), None)
        if found is None:
            missing.append(want.names[0])
        elif want.is_coded:
            wrong.append(_CODES.format(want.names[0]))
        elif shares_elements(want.tensor):
            wrong.append(
                f"{want.names[0]} has no memory of its own; where zoo.inference.stream has it on disk, close() brings "
                "it back"
            )
        elif tuple(source.shapes[found]) != want.shape:
            wrong.append(f"{want.names[0]} has shape {tuple(source.shapes[found])} there and {want.shape} in the model")
        elif _role(want, source.roles[found]) is None:
            wrong.append(f"{want.names[0]} has no values there, and is only {', '.join(source.roles[found])}")
        else:
            matched.append((want, found))
    unused = [there for name, there in given.items() if name not in of_model]
    if wrong or (strict and (missing or unused)):
        told = [f"{len(missing)} tensors are missing: {', '.join(missing[:5])}"] if missing and strict else []
        told += [f"{len(unused)} are not the model's: {', '.join(unused[:5])}"] if unused and strict else []
        told += wrong[:5]
        raise ValueError(f"the tensors do not fit the model; {'; '.join(told)}. Nothing was changed.")
    return matched, unused


def _role(want: _Wanted, roles: Mapping[str, str]) -> str | None:
    return next((role for role in (want.role, *_VALUES) if role in roles), None)


def _fill(want: _Wanted, source: Source, name: str, device: torch.device) -> None:
    tensor = want.tensor
    role = _role(want, source.roles[name])
    if role is None:
        raise AssertionError(f"{name} has no values, which was to be told before")
    if tensor.is_meta:
        tensor = _made(want, device)
    part = split_of(tensor).box or Box.whole(want.shape)
    with torch.no_grad():
        for laid in boxes_of(part):
            for here, there in _pieces(laid.here, laid.box, tensor.dtype.itemsize):
                tensor[here.ranges] = source.read_box(name, role, there).to(tensor.dtype)


def _made(want: _Wanted, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(want.tensor, device=device)
    if isinstance(want.tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(empty, requires_grad=want.tensor.requires_grad)
        made.__dict__.update(want.tensor.__dict__)
    else:
        made = empty
    for module, name in want.places:
        kept = module._parameters if isinstance(made, nn.Parameter) else module._buffers
        kept[name] = made  # type: ignore[assignment]
    return made


def _pieces(here: Box, there: Box, itemsize: int) -> Iterator[tuple[Box, Box]]:
    """A box and where it goes, in pieces of a few MiB along the first dim."""
    if not there.sizes:
        yield here, there
        return
    row = max(there.numel // max(there.sizes[0], 1) * itemsize, 1)
    rows = max(_PIECE_BYTES // row, 1)
    for at in range(0, there.sizes[0], rows):
        sizes = (min(rows, there.sizes[0] - at), *there.sizes[1:])
        yield (Box((here.offsets[0] + at, *here.offsets[1:]), sizes),
               Box((there.offsets[0] + at, *there.offsets[1:]), sizes))  # fmt: skip


def slices(model: nn.Module, comm: Communicator) -> Iterator[StateSlice]:
    """What this rank saves of a split model (``zoo.checkpointing.save``): over all ranks every element once.

    What several ranks have comes from the first of them.

    Args:
        comm: the ranks of the axis.

    Raises:
        ValueError: layers are in codes.
    """
    owners = {id(p): part_of(module) for module in model.modules() for p in module.parameters(recurse=False)}
    wanted = _wanted(model)
    for want in wanted:
        if want.is_coded:
            raise ValueError(_CODES.format(want.names[0]) + ".")
    for want in wanted:
        split = split_of(want.tensor)
        if split.box is None:
            if comm.rank == 0:
                flat = want.tensor.detach().reshape(-1)
                yield StateSlice(want.names[0], want.role, 0, flat.numel(), want.shape, flat)
            continue
        part = owners.get(id(want.tensor))
        before = part.cut.before if part is not None else ()
        dim = part.dim if part is not None and want.tensor.dim() > 1 else 0
        for here, there in _own(split.box, before, dim, want.shape):
            flat = want.tensor.detach()[here.ranges].reshape(-1)
            start = Box.whole(want.shape).number_of(there.offsets)
            yield StateSlice(want.names[0], want.role, start, flat.numel(), want.shape, flat, box=there)


def _own(
    part: Box | Boxes, before: tuple[tuple[int, int], ...], dim: int, whole: tuple[int, ...]
) -> Iterator[tuple[Box, Box]]:  # fmt: skip
    """The boxes of a part, and where they are in it, without what ranks before have too along ``dim``."""
    for laid in boxes_of(part):
        rest = [laid.box]
        for start, stop in before:
            sizes = (*whole[:dim], stop - start, *whole[dim + 1 :])
            other = Box(tuple(start if d == dim else 0 for d in range(len(whole))), sizes)
            rest = [piece for box in rest for piece in box.minus(other)]
        for box in rest:
            yield laid.here_of(box), box
