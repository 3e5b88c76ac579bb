"""Models with packed layers in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import TensorFile
from zoo.compression.packed.linear import SIZES, put, with_transforms_of
from zoo.kernels.packed_linear import PackedWeight
from zoo.nn import PackedLinear

KEY = "zoo.packed"
"""Of the file's metadata: for each packed layer its bits, group size, whether it has minima, and rank."""


def save_packed(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the model's ``state_dict``, codes as they are; tied tensors once.

    A file of that name is replaced, whole or not at all.
    """
    first: dict[int, str] = {}
    described, again = {}, set()
    for name, m in model.named_modules(remove_duplicate=False):
        if isinstance(m, PackedLinear):
            if first.setdefault(id(m), name) != name:
                again.add(name)
                continue
            described[name] = {
                "bits": m.bits, "group_size": m.group_size, "minima": m.minima is not None,
                "rank": 0 if m.left is None else m.left.shape[1],
            }  # fmt: skip
    tensors, tied, seen = {}, {}, dict[int, str]()
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[0] in again:
            continue  # a layer under another name: written once, put in the place of all
        if id(value) in seen:
            tied[name] = seen[id(value)]
        else:
            seen[id(value)] = name
            tensors[name] = value.detach()
    about = {KEY: json.dumps({"layers": described, "tied": tied})}
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    with TensorFile(Path(path), shapes, about) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)
        file.commit()


def load_packed(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """The model that :func:`save_packed` wrote, in the place of this one of the same architecture.

    Args:
        model: with its linear layers, whatever their values, on "meta" too: those become packed.

    Returns:
        The model; the packed layer where it is that itself.

    Raises:
        ValueError: a file that is not whole or not of ``save_packed``, or of another model: the sentence names what
            differs, and the model is as it was.
    """
    from safetensors import SafetensorError, safe_open

    file_name = Path(path).name
    try:
        with safe_open(path, framework="pt") as file:
            about = _checked((file.metadata() or {}).get(KEY), file_name)
            made = {name: _empty(model, name, of_layer) for name, of_layer in about["layers"].items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file_name} is no whole safetensors file: {error}.") from error
    tensors |= {name: tensors[other] for name, other in about["tied"].items() if other in tensors}
    parts, rest = _wanted(model, made)
    _check(tensors, parts | rest, file_name, exact={name for name in parts if not name.endswith("bias")})
    # Nothing of the model changes before all of the file is known to fit.
    for name, module in made.items():
        own = {key: tensors[_join(name, key)] for key in module.state_dict()}
        module.load_state_dict(own, assign=any(t.is_meta for t in module.state_dict().values()))
    found = put(model, made)
    others = {name: tensors[name] for name in rest}
    found.load_state_dict(others, strict=False, assign=any(t.is_meta for t in rest.values()))
    return found


Tensors = dict[str, torch.Tensor]


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _wanted(model: nn.Module, made: Mapping[str, PackedLinear]) -> tuple[Tensors, Tensors]:
    """What a file has to have, as it will be in the model: of packed layers, and the rest."""
    gone = {id(model.get_submodule(name)): name for name in made}
    if len(gone) < len(made):
        alone = sorted(set(made) - set(gone.values()))
        raise ValueError(f"the file has the packed layers {alone[:3]} of their own, which are others' in this model.")
    replaced = {name for name, m in model.named_modules(remove_duplicate=False) if id(m) in gone}
    rest = {k: v for k, v in model.state_dict().items() if k.rpartition(".")[0] not in replaced}
    return {_join(name, k): v for name, m in made.items() for k, v in m.state_dict().items()}, rest


def _check(tensors: Tensors, wanted: Tensors, file_name: str, exact: Set[str]) -> None:
    if wanted.keys() != tensors.keys():
        missing, more = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise ValueError(f"{file_name} is of another model: it lacks {missing[:5]}, and has besides {more[:5]}.")
    for name, value in tensors.items():
        other = wanted[name]
        real = value.is_floating_point() and other.is_floating_point() and name not in exact
        if value.shape != other.shape or not (real or value.dtype == other.dtype):
            raise ValueError(
                f"{file_name} is of another model: {name} is {value.dtype} of shape {tuple(value.shape)}, and in this "
                f"model {other.dtype} of shape {tuple(other.shape)}."
            )


def _checked(text: str | None, name: str) -> Any:
    try:
        about = json.loads(text or "")
        for of_layer in about["layers"].values():
            sizes = [of_layer["bits"], of_layer["group_size"], of_layer["rank"]]
            if not all(type(n) is int and n >= 0 for n in sizes) or type(of_layer["minima"]) is not bool:
                raise TypeError
        if not all(isinstance(value, str) for value in about["tied"].values()):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{name} was not written by save_packed: its metadata names no packed layers.") from None
    return about


def _empty(model: nn.Module, name: str, about: dict[str, Any]) -> PackedLinear:
    """A layer for what the file has, in the place of this one."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the file has a packed layer {name!r}, which this model lacks.") from None
    before = module
    if isinstance(module, PackedLinear):
        module = nn.Linear(module.in_features, module.out_features, module.bias is not None, device=module.q.device)
    bits, size, rank = about["bits"], about["group_size"], about["rank"]
    columns = getattr(module, "in_features", 0)
    if (
        not isinstance(module, nn.Linear)
        or bits not in SIZES
        or size < 16
        or columns % size
        or rank > min(columns, module.out_features)
    ):
        raise ValueError(
            f"the file has a packed layer {name!r} of {bits} bits in groups of {size}; in this model that is {module}."
        )
    rows, groups = module.out_features, module.out_features * (columns // size)
    device = module.weight.device
    numbers = torch.empty(groups, device=device)
    weight = PackedWeight(
        torch.empty(rows * columns * bits // 8, dtype=torch.uint8 if about["minima"] else torch.int8, device=device),
        numbers, torch.empty_like(numbers) if about["minima"] else None, (rows, columns), bits, size,
    )  # fmt: skip
    thin = (torch.empty(rows, rank, device=device), torch.empty(rank, columns, device=device)) if rank else None
    return with_transforms_of(before, PackedLinear(weight, module.bias, thin).train(before.training), name)
