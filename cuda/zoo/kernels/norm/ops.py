"""The norm over lists of tensors: native on CPUs and on CUDA, else the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.kernels import loading
from zoo.kernels.norm import reference
from zoo.kernels.operators import Operator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Tensors = Sequence[torch.Tensor]


@torch.no_grad()
def sum_squares(tensors: Tensors) -> torch.Tensor:
    """S = Σx² of each tensor, fp64, shape (len(tensors),); finite if and only if the tensor is.

    Args:
        tensors: contiguous, of any shapes, all fp32, bf16 or fp16 (fp64 runs in the reference).

    Raises:
        ValueError: a dtype, device or layout that cannot be.
    """
    if tensors and _native("sum_squares", tensors):
        found: torch.Tensor = _sum.native(list(tensors), check=lambda: _check(tensors))
        return found
    _check(tensors)
    return reference.scale_sum_squares_(tensors, 1.0) if tensors else torch.empty(0, dtype=torch.float64)


@torch.no_grad()
def scale_sum_squares_(tensors: Tensors, factor: float) -> torch.Tensor:
    """x ← factor·x in place, and :func:`sum_squares` of the result, in one pass: unscaling, norm and overflow check."""
    if tensors and _native("scale_sum_squares_", tensors):
        found: torch.Tensor = _scale_and_sum.native(list(tensors), factor, check=lambda: _check(tensors))
        return found
    _check(tensors)
    return reference.scale_sum_squares_(tensors, factor) if tensors else torch.empty(0, dtype=torch.float64)


def grad_norm(tensors: Tensors) -> float:
    """√Σx² over all tensors: infinite or NaN if an element is."""
    return float(sum_squares(tensors).sum().sqrt())


def _sums(tensors: list[torch.Tensor], *_: float) -> torch.Tensor:
    return tensors[0].new_empty(len(tensors), dtype=torch.float64)


_sum = Operator("sum_squares", None, fake=_sums)
_scale_and_sum = Operator("scale_sum_squares_", None, fake=_sums)


def _native(name: str, tensors: Tensors) -> bool:
    first = tensors[0]
    # Tensors on several devices, or of several dtypes, are for _check to refuse.
    plain = all(t.device == first.device and t.dtype is not torch.float64 for t in tensors)
    return plain and loading.runs(name, first)


def _check(tensors: Tensors) -> None:
    for i, t in enumerate(tensors):
        if t.dtype not in (*DTYPES, torch.float64) or t.dtype is not tensors[0].dtype:
            raise ValueError(f"tensors[{i}] is {t.dtype}; all must be of one dtype, floating point.")
        if t.device != tensors[0].device:
            raise ValueError(f"tensors[{i}] is on {t.device}; tensors[0] is on {tensors[0].device}.")
        if t.layout is not torch.strided or not t.is_contiguous():
            raise ValueError(f"tensors[{i}] of shape {tuple(t.shape)} is {t.layout}; it must be dense and contiguous.")
