"""Copies of tensors that take no more room in a file than they have elements."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: T, device: torch.device | str = _CPU) -> T:
    """A copy of ``item`` whose tensors are clones on ``device``, each with a storage of its own size.

    ``torch.save`` writes the whole storage of a tensor, so a view of a large flat buffer, such as a parameter of stages
    0 to 2, makes a file as large as the buffer. Dtypes, shapes and the structure stay: lists, tuples, named tuples,
    dicts and their subclasses with their attributes, nested as they are. Tensors that are the same elements of one
    storage (tied parameters) are one clone, and stay so in the file. Clones are not part of autograd. What is neither a
    tensor nor such a container is taken as it is.

    Args:
        item: a tensor, or a container of tensors, such as ``engine.module.state_dict()`` at stages 0 to 2, or what
            ``engine.module_state_dict()`` returns at any.
        device: of the clones.
    """
    copied: T = _copied(item, torch.device(device), {})
    return copied


def _copied(item: Any, device: torch.device, known: dict[Any, Any]) -> Any:
    if isinstance(item, torch.Tensor):
        return _clone(item, device, known)
    if isinstance(item, tuple):
        parts = [_copied(part, device, known) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
    if isinstance(item, (list, dict)):
        return _like(item, device, known)
    return item


def _like(item: Any, device: torch.device, known: dict[Any, Any]) -> Any:
    """A list or dict with copies of the parts, and the attributes of ``item``: a state_dict has ``_metadata``."""
    new = copy.copy(item)  # a class of its own may want arguments when it is called
    if isinstance(item, dict):
        for key, value in item.items():  # update() of a Counter would count the pairs
            new[key] = _copied(value, device, known)
    else:
        new[:] = [_copied(value, device, known) for value in item]
    if hasattr(item, "__dict__"):
        new.__dict__.update(item.__dict__)
    return new


def _clone(tensor: torch.Tensor, device: torch.device, known: dict[Any, Any]) -> torch.Tensor:
    detached = tensor.detach()
    if detached.layout is not torch.strided or detached.is_meta:  # sparse ones have no storage of their own
        return detached.to(device, copy=True)
    place: Any = id(tensor)
    if detached.numel():
        place = (detached.device, detached.data_ptr(), detached.dtype, detached.shape, detached.stride(),
                 detached.is_conj(), detached.is_neg())  # fmt: skip
    if place not in known:
        # Also what lies in its storage with gaps, or several times, becomes as large as it has elements.
        clone = torch.empty_like(detached, device=device, memory_format=torch.preserve_format)
        known[place] = clone.copy_(detached)
    found: torch.Tensor = known[place]
    return found
