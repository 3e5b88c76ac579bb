"""Frozen parameters of a class of their own, as quantised weights have them (bitsandbytes' ``Params4bit``).

Their elements are codes, whatever their dtype says: what they stand for only their module knows, by what else the
parameter has (scales, a table of values). So they are neither converted nor rounded on their way; everything else in
``zoo.zero`` treats them as any frozen parameter. Each is still an instance of its class, with its attributes, of which
every rank keeps its own: they have to be alike, as codes of one rank mean something else by another's scales.

Dettmers et al. 2023, "QLoRA", section 3.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

_DEPTH = 4  # attributes of attributes, as nested quantisation has them


def is_coded(parameter: torch.Tensor) -> bool:
    """Whether it is a frozen parameter of a class of its own that has memory as a plain tensor has it."""
    cls = type(parameter)
    if getattr(cls, "_zoo_coded", None) is not None:
        return True
    return (
        isinstance(parameter, nn.Parameter) and issubclass(cls, nn.Parameter) and cls is not nn.Parameter
        and not parameter.requires_grad and not hasattr(cls, "_zoo_adoptable") and not hasattr(cls, "_zoo_bucket")
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and not torch.nn.parameter.is_lazy(parameter)
    )  # fmt: skip


def class_of(parameter: torch.Tensor) -> type[nn.Parameter]:
    """What it was before it lay in a bucket."""
    if not is_coded(parameter):
        return nn.Parameter
    return getattr(type(parameter), "_zoo_coded", None) or type(parameter)  # type: ignore[return-value]


def shown(cls: type[nn.Parameter]) -> Any:
    """What the class does to functions of torch, as it stands in its body."""
    return inspect.getattr_static(cls, "__torch_function__")


def ordinary(parameter: Any, values: torch.Tensor, memo: dict[int, Any] | None = None) -> nn.Parameter:
    """A parameter of its class with ``values`` and its attributes; with ``memo`` these are copies."""
    base = class_of(parameter)
    made: nn.Parameter = torch.Tensor._make_subclass(base, values, parameter.requires_grad)
    own = {key: value for key, value in parameter.__dict__.items() if not key.startswith("_zoo_")}
    made.__dict__.update(own if memo is None else copy.deepcopy(own, memo))
    return made


def meaning(parameters: Mapping[str, nn.Parameter]) -> str:
    """A fingerprint of the classes and attributes of those that are coded, the same on every rank that has the same;
    empty without any."""
    digest, found = hashlib.blake2b(digest_size=8), False
    for name, parameter in parameters.items():
        if is_coded(parameter):
            found = True
            digest.update(f"{name} {class_of(parameter).__qualname__}".encode())
            _describe(digest, {k: v for k, v in parameter.__dict__.items() if not k.startswith("_zoo_")}, _DEPTH)
    return digest.hexdigest() if found else ""


def _describe(digest: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
        if value.device.type != "meta":
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        digest.update(repr(value).encode())
    elif depth and isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _describe(digest, value[key], depth - 1)
    elif depth and isinstance(value, Sequence):
        for item in value:
            _describe(digest, item, depth - 1)
    elif depth and not isinstance(value, (nn.Module, type)) and hasattr(value, "__dict__"):
        _describe(digest, vars(value), depth - 1)
