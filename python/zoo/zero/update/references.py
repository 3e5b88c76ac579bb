"""Whether an optimizer holds parameters of the model beside its groups: by object, by ``id``, or through a module.

Its update treats these parameters otherwise than the rest, perhaps, and flat segments are none of them. What can be
reached is looked at: attributes of the optimizer, options of its groups, and what its methods refer to.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn

_MOST = 50_000
"""Objects that are looked at: whoever has more of them is no optimizer."""
_DEPTH = 8
_KNOWN = ("torch", "zoo", "numpy", "collections", "functools", "logging", "weakref", "threading", "typing")
"""Packages whose classes and functions refer to no parameters that they were not given."""
_OF_TORCH = frozenset({"param_groups", "state", "defaults", "step", "_zero_grad_profile_name"})
"""Attributes of every optimizer. ``step`` is looked at where it was replaced."""


def found_in(optimizer: Any, parameters: Iterable[torch.Tensor], twins: Mapping[str, bool] | None = None) -> str | None:
    """Where ``optimizer`` holds one of ``parameters``, in words; None if it holds none.

    Args:
        optimizer: an instance.
        parameters: of the model.
        twins: attributes with which another instance holds tensors of its own groups: those come from the groups.
    """
    search = _Search(parameters, optimizer)
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names") and search.holds(value):
                return f"the option {key!r} of its groups"
    for key, value in vars(optimizer).items():
        taken = key in _OF_TORCH or (key.startswith("_optimizer_") and key.endswith("_hooks"))
        if not taken and not (twins or {}).get(key) and search.holds(value):
            return f"its attribute {key!r}"
    for cls in type(optimizer).__mro__:
        if not is_known(cls):
            for key, value in vars(cls).items():
                own = not key.startswith("__") or isinstance(value, types.FunctionType)
                if own and search.holds(value):
                    return f"{cls.__name__}.{key}"
    return None


def held_by(optimizer: Any) -> dict[str, bool]:
    """By attribute, whether it holds one of the tensors of the optimizer's own groups."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    return {key: _Search(own, optimizer).holds(value) for key, value in vars(optimizer).items() if key not in _OF_TORCH}


def is_known(thing: Any) -> bool:
    """Whether a class or function is of torch, of zoo, or of another package that knows no model."""
    module = str(getattr(thing, "__module__", "") or "")
    return module == "builtins" or module.split(".")[0] in _KNOWN


class _Search:
    """Looks for parameters, each object once."""

    def __init__(self, parameters: Iterable[torch.Tensor], owner: Any) -> None:
        self._parameters = {id(p) for p in parameters}
        self._seen = {id(owner)}
        self._left = _MOST

    def holds(self, value: Any) -> bool:
        """Whether one of them can be reached from ``value``."""
        left = deque([(value, 0)])
        while left and self._left:
            self._left -= 1
            item, depth = left.popleft()
            if isinstance(item, int):
                if int(item) in self._parameters:
                    return True
                continue
            if isinstance(item, torch.Tensor) and id(item) in self._parameters:
                return True
            if isinstance(item, torch.Tensor) or id(item) in self._seen:
                continue
            self._seen.add(id(item))
            if isinstance(item, nn.Module):
                if any(id(p) in self._parameters for p in item.parameters()):
                    return True
                continue
            if depth < _DEPTH:
                left.extend((inner, depth + 1) for inner in _inside(item))
        return False


def _inside(item: Any) -> Iterator[Any]:
    """What an object refers to."""
    if isinstance(item, (str, bytes, float, complex, type(None), type, types.ModuleType)):
        return
    if isinstance(item, Mapping):
        for key, value in list(item.items()):
            yield from (key, value)
    elif isinstance(item, (list, tuple, Set, deque)):
        yield from list(item)
    elif isinstance(item, weakref.ref):
        yield item()
    elif isinstance(item, (types.FunctionType, types.MethodType, staticmethod, classmethod, property)):
        yield from _of_function(item)
    elif hasattr(item, "func") and hasattr(item, "keywords"):  # functools.partial
        yield from (item.func, item.args, item.keywords)
    elif not is_known(type(item)) or isinstance(item, torch.optim.Optimizer):
        yield from list(getattr(item, "__dict__", {}).values())


def _of_function(item: Any) -> Iterator[Any]:
    if isinstance(item, types.MethodType):
        yield item.__self__
        item = item.__func__
    if isinstance(item, (staticmethod, classmethod)):
        item = item.__func__
    if isinstance(item, property):
        yield from (f for f in (item.fget, item.fset) if f is not None)
        return
    if not isinstance(item, types.FunctionType):
        return
    for cell in item.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue
    yield from item.__defaults__ or ()
    yield from (item.__kwdefaults__ or {}).values()
    if is_known(item):
        return
    for name in item.__code__.co_names:
        value = item.__globals__.get(name)
        if isinstance(value, (Mapping, list, tuple, Set, torch.Tensor, nn.Module, types.FunctionType)) or (
            value is not None and not isinstance(value, (type, types.ModuleType)) and not is_known(type(value))
        ):
            yield value
