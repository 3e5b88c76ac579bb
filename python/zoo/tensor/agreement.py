"""Ranks that split a model together have the same model and the same plan, or are told before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from zoo.comm import Communicator, together
from zoo.layout import split_of

T = TypeVar("T")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_or_none(
    comm: Communicator | None, what: str, work: Callable[[], T], said: Callable[[T], Any] | None = None
) -> T:
    """What ``work`` returns, after all ranks have come so far. Collective over ``comm``, if there is one.

    Args:
        what: the subject of the error's sentence. said: of what is returned, {subject: what all ranks have alike}.

    Raises:
        ValueError: on all ranks, where it raised on some, or what they say differs.
    """
    if comm is None or comm.size == 1:
        return work()
    found: list[T] = []

    def run() -> Any:
        found.append(work())
        return None if said is None else said(found[0])

    everyone = together(comm, what, run, error=lambda told, ranks: ValueError(told), plain=ValueError)
    if said is not None:
        first = everyone[0]
        for rank, other in enumerate(everyone):
            differs = [key for key in {**first, **other} if first.get(key) != other.get(key)]
            if differs:
                more = f" and {len(differs) - 1} more" if len(differs) > 1 else ""
                raise ValueError(
                    f"{what} failed: rank {rank} of the axis has another {differs[0]} than rank 0{more}. All its ranks "
                    "make the same model (one seed, or one checkpoint) and split it alike. Nothing was changed."
                )
    return found[0]


def description(model: nn.Module) -> dict[str, Any]:
    """By name: shape, dtype, whether it gets a gradient, and a checksum, of every parameter and buffer that is no part
    of a larger one already."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    tensors = {name: tensor for name, tensor in tensors.items() if split_of(tensor).box is None}
    sums = [_checksum(tensor.detach()) for tensor in tensors.values()]
    values = torch.stack([s.cpu() for s in sums]).tolist() if sums else []
    return {
        f"tensor {name}": (tuple(tensor.shape), str(tensor.dtype), tensor.is_meta, tensor.requires_grad, value)
        for (name, tensor), value in zip(tensors.items(), values, strict=True)
    }


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of its bits as integers, which wraps around; 0 of what has no values."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat, each = tensor.view(_INTEGERS[tensor.itemsize]).contiguous().view(-1), 8 // tensor.itemsize
    if flat.numel() % each or flat.storage_offset() % each:
        flat = F.pad(flat, (0, -flat.numel() % each), value=0) if flat.numel() % each else flat.clone()
    return flat.view(torch.int64).sum()  # eight bytes at a time: read once, and nothing is cast
