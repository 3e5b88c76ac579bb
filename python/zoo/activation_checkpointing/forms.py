"""Tensors as flat runs of values, and back with the same shape and strides."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Form", "flatten", "stays", "unflatten"]


@dataclass(frozen=True)
class Form:
    """How values lie in a tensor: (*shape) with ``strides``; ``dense``: without gaps, in some order of dimensions."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool


def stays(tensor: torch.Tensor) -> bool:
    """Whether a tensor cannot be flattened, or nothing is saved by it: it waits where it is.

    Parameters live anyway. Subclasses, sparse, lazily conjugated and empty tensors are no plain runs of values.
    """
    return (
        type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta or tensor.is_conj()
        or tensor.is_neg() or tensor.is_quantized or not tensor.numel()
    )  # fmt: skip


def flatten(tensor: torch.Tensor) -> tuple[torch.Tensor, Form]:
    """(numel,) values, a view where the tensor has no gaps; a dimension of stride 0 is taken once.

    Kernels may choose their order of additions by strides, and so a repeated computation has to see the same ones.
    """
    tensor = tensor.detach()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.is_contiguous():
        return tensor.reshape(-1), Form(shape, strides, True)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    match _lie(tuple(tensor.shape), strides):
        case "dense":
            return tensor.as_strided((tensor.numel(),), (1,)), Form(shape, strides, True)
        case "gaps":
            return tensor.contiguous().reshape(-1), Form(shape, strides, False)
    # Windows that overlap: nothing can be written into such a tensor, so it comes back without the overlap.
    whole = tensor.contiguous()
    return whole.reshape(-1), Form(shape, _repeated(shape, strides, whole.stride()), True)


def unflatten(flat: torch.Tensor, form: Form) -> torch.Tensor:
    """The tensor of these values, a view of them where it has no gaps."""
    if form.dense:
        return flat.as_strided(form.shape, form.strides, flat.storage_offset())
    found = flat.new_empty_strided(form.shape, form.strides)
    once = found
    for dim, (size, stride) in enumerate(zip(form.shape, form.strides, strict=True)):
        if size > 1 and stride == 0:
            once = once.narrow(dim, 0, 1)
    once.copy_(flat.view(once.shape))
    return found


def _lie(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """ "dense", "gaps" or "overlap": of all values in memory, in the order of their strides."""
    span, result = 1, "dense"
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride < span:
            return "overlap"
        if stride > span:
            result = "gaps"
        span += (size - 1) * stride
    return result


def _repeated(shape: tuple[int, ...], strides: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        0 if size > 1 and stride == 0 else mine for size, stride, mine in zip(shape, strides, own, strict=True)
    )
