"""Tensors in nested containers of any class: changed where something changes, and else the very objects given."""

from __future__ import annotations

import copy
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``change`` of each tensor in it.

    Dicts, lists, tuples (also of torch, such as what ``max`` returns), deques, ``UserDict`` and ``UserList`` are looked
    into, with all of their subclasses. One of whose tensors ``change`` returns another is copied, and the copy has its
    class and attributes: an attribute that is an item, as in classes whose keys are attributes, stays that item. All
    else is the object that was given, so that what is written into it is seen outside.

    Raises:
        ValueError: a container has to be copied and cannot be.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
        data = change(value.data)
        packed: Any = value
        return value if data is value.data else packed.to(data.device, data.dtype)
    if isinstance(value, (dict, UserDict)):
        places: Iterable[Any] = list(value)
        items = [value[key] for key in places]
    elif isinstance(value, (tuple, list, UserList, deque)):
        places = range(len(value))
        items = list(value)
    else:
        return value
    mapped = [map_tensors(change, item) for item in items]
    changed = {id(old): (old, new) for old, new in zip(items, mapped, strict=True) if old is not new}
    if not changed:
        return value
    try:
        made = _tuple(value, mapped) if isinstance(value, tuple) else _copied(value)
        if not isinstance(value, tuple):
            for place, old, new in zip(places, items, mapped, strict=True):
                if old is not new:
                    made[place] = new
    except Exception as error:
        name = type(value).__name__
        raise ValueError(
            f"tensors in a {name} have to be moved or cast, and it cannot be copied: {type(error).__name__}: {error}. "
            f"Give them in the right place and dtype, give {name} a __copy__, or take a dict, a list or a tuple."
        ) from error
    attributes = getattr(made, "__dict__", None)
    if attributes is not None and attributes is not made:
        for name, old in list(attributes.items()):
            if id(old) in changed:
                attributes[name] = changed[id(old)][1]
    return made


def _copied(value: Any) -> Any:
    """A shallow copy of the same class."""
    kind: Any = type(value)
    if kind in (dict, list):
        return kind(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is not value:
        try:
            return copy.copy(value)
        except Exception:
            # A __getattr__ that raises KeyError keeps Python 3.10 from copying.
            if not isinstance(value, (dict, list)):
                raise
    made = kind.__new__(kind)
    if isinstance(value, dict):
        dict.update(made, value)
    else:
        list.extend(made, value)
    if attributes is value:
        made.__dict__ = made  # keys are attributes
    elif attributes:
        made.__dict__.update(attributes)
    return made


def _tuple(value: tuple[Any, ...], items: list[Any]) -> Any:
    """A tuple of the same class, with the attributes of ``value``."""
    kind = type(value)
    try:
        made = tuple.__new__(kind, items)
    except TypeError:
        return kind(items)  # of C, as those of torch.return_types
    if attributes := getattr(value, "__dict__", None):
        made.__dict__.update(attributes)
    return made
