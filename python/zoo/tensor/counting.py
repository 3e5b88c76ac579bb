"""What counts heads besides matrices: attributes of modules, and arguments that have something for every head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.comm import Communicator
from zoo.tensor.dims import Dims
from zoo.tensor.plans import Count, Plan, Take, matches
from zoo.tensor.shares import HEAD, KV, QUERY


@dataclass(frozen=True)
class Setting:
    """Who splits: ``comm`` the ranks of the axis, ``training`` with gradients, ``grain`` of hidden features."""

    comm: Communicator
    training: bool
    grain: int


def counts_of(model: nn.Module, plan: Plan, setting: Setting) -> list[Callable[[], None]]:
    """What sets the attributes that count heads.

    Raises:
        ValueError: the model does not have them, or a size is not known.
    """
    found: list[Callable[[], None]] = []
    share = plan.share(setting.comm.size, setting.comm.rank, setting.grain)
    known, dealt = dict(plan.sizes), {HEAD, KV, QUERY} | {rule.cut for rule in plan.rules}
    for count in plan.counts:
        value = 1
        for factor in Dims.parse(count.dims).factors:
            if isinstance(factor, tuple):
                raise ValueError(f"{count}: a product of dims, without brackets.")
            size = factor.size
            if size is None:
                size = share.size(factor.name) if factor.name in dealt else known.get(factor.name)
            if size is None:
                raise ValueError(f"{count}: the plan has no size for {factor.name!r}.")
            value *= size
        for path, module in _modules(model, count.module, count):
            found.append(_counting(path, module, count, value))
    return found


def _counting(path: str, module: nn.Module, count: Count, value: int) -> Callable[[], None]:
    holder, _, name = count.attribute.rpartition(".")
    owner = getattr(module, holder, None) if holder else module
    if not hasattr(owner, name):
        raise ValueError(f"{path} has no attribute {count.attribute!r}, which plan and model have to agree on.")

    def apply() -> None:
        if holder:
            setattr(module, holder, except_for(getattr(module, holder), {name: value}))
        else:
            setattr(module, name, value)

    return apply


def except_for(whole: Any, own: Mapping[str, Any]) -> Any:
    """What reads and writes as ``whole``, now and later, but for attributes of its own: an attention module's
    configuration has this rank's heads, and follows ``set_attn_implementation`` of the model."""
    kind = type(whole)
    if kind in _VIEWS.values():  # of a view, another one
        own = {**object.__getattribute__(whole, "_own"), **own}
        whole = object.__getattribute__(whole, "_whole")
        kind = type(whole)
    found: Any = object.__new__(_view(kind))
    object.__setattr__(found, "_whole", whole)
    object.__setattr__(found, "_own", dict(own))
    return found


_VIEWS: dict[type, type] = {}


def _view(kind: type) -> type:
    def read(self: Any, name: str) -> Any:
        own = object.__getattribute__(self, "_own")
        if name in own:
            return own[name]
        if name in _OF_VIEW:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_whole"), name)

    def write(self: Any, name: str, value: Any) -> None:
        own = object.__getattribute__(self, "_own")
        if name in own:
            own[name] = value
        else:
            setattr(object.__getattribute__(self, "_whole"), name, value)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        memo[id(self)] = found = object.__new__(type(self))
        object.__setattr__(found, "_whole", copy.deepcopy(object.__getattribute__(self, "_whole"), memo))
        object.__setattr__(found, "_own", dict(object.__getattribute__(self, "_own")))
        return found

    names = {"__getattribute__": read, "__setattr__": write, "__deepcopy__": copied, "__module__": kind.__module__}
    if kind not in _VIEWS:
        _VIEWS[kind] = type(kind.__name__, (kind,), names)
    return _VIEWS[kind]


_OF_VIEW = frozenset({"__class__", "__deepcopy__", "__reduce_ex__"})


def takes_of(model: nn.Module, plan: Plan, setting: Setting) -> list[Callable[[], Any]]:
    """What gives modules their part of arguments.

    Raises:
        ValueError: the model does not have them.
    """
    return [
        partial(module.register_forward_pre_hook, _Taking(take, plan, setting), with_kwargs=True)
        for take in plan.takes
        for _, module in _modules(model, take.module, take)
    ]


class _Taking:
    """A hook that gives a module its own part of an argument. Arguments without gradients only: slopes, masks."""

    def __init__(self, take: Take, plan: Plan, setting: Setting) -> None:
        self._take, self._plan, self._setting = take, plan, setting

    def __deepcopy__(self, memo: dict[int, Any]) -> _Taking:
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, comm = self._take.argument, self._setting.comm
        given = args[name] if isinstance(name, int) and name < len(args) else kwargs.get(str(name))
        if not isinstance(given, torch.Tensor):
            return None
        if given.requires_grad:
            raise ValueError(f"{self._take}: it needs a gradient, which would be this rank's alone.")
        dims = Dims.parse(self._take.dims).resolved(dict(self._plan.sizes), given.shape[self._take.dim], str(name))
        runs = dims.runs(self._take.cut, self._plan.share(comm.size, comm.rank, self._setting.grain))
        mine = torch.cat([given.narrow(self._take.dim, start, stop - start) for start, stop in runs], self._take.dim)
        if isinstance(name, int):
            return (*args[:name], mine, *args[name + 1 :]), kwargs
        return args, {**kwargs, name: mine}


def _modules(model: nn.Module, pattern: str, of: Any) -> list[tuple[str, nn.Module]]:
    found = [(path, module) for path, module in model.named_modules() if matches(pattern, path)]
    if not found:
        raise ValueError(f"{of}: the model has no such module.")
    return found
