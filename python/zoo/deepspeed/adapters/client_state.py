"""``client_state`` of programs that pickle theirs: what a checkpoint of zoo can hold of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def plain_state(value: Mapping[str, Any] | None) -> Any:
    """``value`` with members of enums that are numbers or strings, ``torch.__version__`` and other subclasses of int,
    float and str as these, to which they are equal; and parameters as tensors. The rest is left as it is, which
    :mod:`zoo.checkpointing.exact` holds or refuses."""
    return _plain(value)


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(_plain, value))
    if isinstance(value, nn.Parameter):
        return value.detach().as_subclass(torch.Tensor)
    if kind is bool or kind in (int, float, str):
        return value
    if isinstance(value, str):
        return "".join([value])
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and not hasattr(value, "dtype"):  # numpy's float64 is one, and is held
        return float(value)
    return value
