"""Whether an optimizer holds parameters of the model beside its groups, found by looking at what it can reach.

By object, by ``id``, or through a module: in attributes of the optimizer, in options of its groups, and in what its
methods refer to.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
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

    Raises:
        NotImplementedError: it holds the address of one, ``p.data_ptr()``.
    """
    search = _Search(parameters, optimizer)
    found: str | None = None
    for where, value in _held(optimizer, twins or {}):
        holds = search.holds(value)
        if search.by_address:
            raise NotImplementedError(
                f"{type(optimizer).__name__} cannot run under a ZeRO optimizer: by {where} it knows parameters by "
                "their address, p.data_ptr(), and under a ZeRO optimizer they lie in flat buffers, at other addresses. "
                "Let it know them by the parameters themselves, or by id(p)."
            )
        if holds and found is None:
            found = where
    return found


def _held(optimizer: Any, twins: Mapping[str, bool]) -> Iterator[tuple[str, Any]]:
    """What may hold parameters, each with its place in words."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key not in ("params", "param_names"):
                yield f"the option {key!r} of its groups", value
    for key, value in vars(optimizer).items():
        of_torch = key in _OF_TORCH or (key.startswith("_optimizer_") and key.endswith("_hooks"))
        if not of_torch and not twins.get(key):
            yield f"its attribute {key!r}", value
    for cls in type(optimizer).__mro__:
        for key, value in vars(cls).items() if not is_known(cls) else ():
            if not key.startswith("__") or isinstance(value, types.FunctionType):
                yield f"{cls.__name__}.{key}", value


def _address(parameter: torch.Tensor) -> int:
    """Of its first element; 0 where there is no memory."""
    try:
        return parameter.data_ptr()
    except (RuntimeError, NotImplementedError):  # a class without memory, or memory that is refused
        return 0


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
        parameters = list(parameters)
        self._parameters = {id(p) for p in parameters}
        self._addresses = {_address(p) for p in parameters} - {0}
        self.by_address = False
        self._seen = {id(owner)}
        self._left = _MOST

    def holds(self, value: Any) -> bool:
        """Whether one of them can be reached from ``value``. An address of one ends the search."""
        left, found = deque([(value, 0)]), False
        while left and self._left and not self.by_address:
            self._left -= 1
            item, depth = left.popleft()
            if isinstance(item, (int, str)):
                found |= self._names(_number_in(item))
            elif isinstance(item, torch.Tensor) and id(item) in self._parameters:
                found = True
            elif id(item) not in self._seen:
                self._seen.add(id(item))
                if isinstance(item, (torch.Tensor, np.ndarray)):
                    found |= any(map(self._names, _integers_of(item)))
                elif isinstance(item, nn.Module):
                    found |= any(id(p) in self._parameters for p in item.parameters())
                elif depth < _DEPTH:
                    left.extend((inner, depth + 1) for inner in _inside(item))
        return found

    def _names(self, number: int) -> bool:
        """Whether a number is the ``id`` or the address of one of them."""
        self.by_address = self.by_address or number in self._addresses
        return self.by_address or number in self._parameters


def _number_in(item: int | str) -> int:
    """A number, or the text of one; 0 for another text."""
    try:
        return item if isinstance(item, int) else int(item, 0)
    except ValueError:
        return 0


def _integers_of(item: Any) -> Iterable[int]:
    """Elements of a tensor or an array that may be addresses, as lists for kernels are kept."""
    if isinstance(item, torch.Tensor):
        plain = item.layout is torch.strided and not (item.is_meta or item.is_nested)
        fits = plain and item.dtype in (torch.int64, torch.uint64) and item.numel() <= _MOST
        return item.reshape(-1).tolist() if fits else ()
    return item.reshape(-1).tolist() if item.dtype.kind in "iu" and item.size <= _MOST else ()


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
