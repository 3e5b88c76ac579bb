"""Uniform quantisation to 8 and 4 bits by zoo.kernels, where it is installed: two passes over memory instead of ten,
and the same bits as ``uniform.py``, which a test holds them to."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

BITS = (4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNIT, LARGEST = 16, 1 << 20


@functools.cache
def _kernels() -> ModuleType | None:
    try:
        from zoo.kernels import quantise
    except ImportError:
        return None
    return quantise


def fits(value: Tensor, num_groups: int, bits: int) -> bool:
    """Whether :func:`nearest` takes it."""
    size = value.numel() // num_groups
    return (
        bits in BITS and value.dtype in DTYPES and value.is_contiguous() and UNIT <= size <= LARGEST
        and size % UNIT == 0 and value.device.type in ("cpu", "cuda") and _kernels() is not None
    )  # fmt: skip


def nearest(value: Tensor, num_groups: int, bits: int, *, asymmetric: bool) -> tuple[Tensor, Tensor]:
    """As ``symmetric`` or ``asymmetric`` of ``uniform.py`` without noise, for a tensor of any shape.

    Returns:
        v, shape and dtype of ``value``, and what shows elements that are infinite or NaN: the scales, (G,).
    """
    ops = _kernels()
    if ops is None:
        raise AssertionError("zoo.kernels is not installed; ask fits() first.")
    flat, size = value.reshape(-1), value.numel() // num_groups
    found = torch.empty_like(flat)
    if asymmetric:
        q, scales, lows = ops.quantise_asymmetric(flat, bits=bits, group_size=size)
        ops.dequantise_asymmetric_(found, q, scales, lows, bits=bits, group_size=size)
    else:
        q, scales = ops.quantise(flat, bits=bits, group_size=size)
        ops.dequantise_(found, q, scales, bits=bits, group_size=size)
    return found.view(value.shape), scales
