"""The tensors in what a module returned, whatever it is."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

_WITHOUT = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, torch.Size, torch.dtype, torch.device,
    torch.Generator, enum.Enum, type, nn.Module,
)  # fmt: skip

_CLOSED = (types.FunctionType, types.MethodType, functools.partial, types.GeneratorType)


def tensors_in(output: Any, unknown: Callable[[Any], None] | None = None) -> Iterator[torch.Tensor]:
    """All tensors in ``output``: in nested tuples, lists, dicts, sets, dataclasses, classes that torch's pytree knows,
    and the attributes of any other object.

    Args:
        unknown: called with an object of which nothing can be seen: it has no attributes.
    """
    return _search(output, unknown, set())


def _search(value: Any, unknown: Callable[[Any], None] | None, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, _WITHOUT) or id(value) in seen:
        return
    seen.add(id(value))
    for item in _items(value, unknown):
        yield from _search(item, unknown, seen)


def _items(value: Any, unknown: Callable[[Any], None] | None) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, member.name, None) for member in dataclasses.fields(value)]
    if type(value) in _pytree.SUPPORTED_NODES:
        return list(_pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0])
    if isinstance(value, _CLOSED) and unknown is not None:
        unknown(value)
    if type(value).__module__ == "numpy":
        return []
    if isinstance(value, Collection):
        return list(value)
    slots = [n for cls in type(value).__mro__ for n in _slots_of(cls) if hasattr(value, n)]
    if not hasattr(value, "__dict__") and not slots and unknown is not None:
        unknown(value)
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name) for name in slots)]


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def refuse_output(unit: str, value: Any) -> None:
    """Raise TypeError: ``value``, which the unit of this name returned, is of a class in which nothing can be found."""
    name = type(value).__name__
    where = repr(unit) if unit else "the model"
    raise TypeError(
        f"{where} returned {'an' if name[0] in 'AEIOU' else 'a'} {name}, in which no tensors can be found: "
        "backward could not tell when it comes back to the module. Return tensors, tuples, lists, dicts, "
        "dataclasses or objects with attributes, or make the class known by "
        "torch.utils._pytree.register_pytree_node."
    )


def hook_gradient(tensor: torch.Tensor, function: Callable[..., None]) -> None:
    """Call ``function`` when the gradient of ``tensor`` is there, unless that is a parameter."""
    node = tensor.grad_fn
    if node is not None:
        node.register_prehook(function)
    elif tensor.requires_grad and getattr(tensor, "_zoo_bucket", None) is None:  # a parameter stays
        tensor.register_hook(function)  # type: ignore[no-untyped-call]
