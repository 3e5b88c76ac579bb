"""``client_state`` of programs that pickle theirs: what a checkpoint of zoo can hold of it."""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from zoo.checkpointing import CheckpointError


def plain_state(value: Mapping[str, Any] | None) -> Any:
    """``value`` with members of enums that are numbers or strings, ``torch.__version__`` and other subclasses of int,
    float and str as these, to which they are equal; and parameters as tensors. The rest is left as it is, which
    :mod:`zoo.checkpointing.format.exact` holds or refuses.

    Raises:
        CheckpointError: it contains itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise CheckpointError(
            "client_state contains itself, or is nested too deeply to be written; leave that out of it."
        ) from None


def _pairs(value: Any) -> dict[Any, Any]:
    return {_plain(key): _plain(item) for key, item in value.items()}


_CONTAINERS: dict[type, Callable[[Any], Any]] = {
    **{kind: lambda value: type(value)(map(_plain, value)) for kind in (list, tuple, set, frozenset)},
    **{kind: lambda value: type(value)(_pairs(value)) for kind in (dict, OrderedDict, Counter)},
    **{kind: lambda value: type(value)(**_pairs(vars(value))) for kind in (argparse.Namespace, SimpleNamespace)},
    defaultdict: lambda value: defaultdict(value.default_factory, _pairs(value)),
    deque: lambda value: deque(map(_plain, value), value.maxlen),
}


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](value)
    if isinstance(value, nn.Parameter):
        return value.detach().as_subclass(torch.Tensor)
    if kind in (bool, int, float, str):
        return value
    if isinstance(value, str) and not hasattr(value, "dtype"):  # numpy's are held as they are
        return "".join([value])
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not hasattr(value, "dtype"):
        return float(value)
    return value
