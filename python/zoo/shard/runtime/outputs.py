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
