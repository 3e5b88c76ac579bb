"""What operations ask of single tensors where no binding does: the same sentences as ``common/checks.h``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

NATIVE = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels take; the references take fp64 too."""


def check_input(what: str, t: torch.Tensor, *, min_dims: int = 1, like: torch.Tensor | None = None) -> None:
    """Raise ValueError unless ``t`` is a dense, contiguous, floating tensor of at least ``min_dims`` dims.

    ``like``: the tensor of the call whose dtype decides where it runs; without fp64 there, none is allowed here.
    """
    check_floating(what, t, like)
    if t.dim() < min_dims:
        raise ValueError(f"{what} has shape {tuple(t.shape)}; it must have at least {min_dims} dims.")
    _check_memory(what, t)


def check_floating(what: str, t: torch.Tensor, like: torch.Tensor | None = None) -> None:
    """Raise ValueError unless ``t`` is of a dtype of the kernels; or fp64, which the references take, as ``like``."""
    fp64 = t.dtype is torch.float64 and (like is None or like.dtype is torch.float64)
    if t.dtype not in NATIVE and not fp64:
        raise ValueError(f"{what} is {t.dtype}; allowed are {', '.join(map(str, NATIVE))}.")


def check_like(
    what: str, t: torch.Tensor, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raise ValueError unless ``t`` has this shape, the device of ``like``, and ``dtype`` (that of ``like``)."""
    wanted = dtype or like.dtype
    if t.dtype is not wanted:
        raise ValueError(f"{what} is {t.dtype}; it must be {wanted}.")
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(t.shape)}; it must be {tuple(shape)}.")
    if t.device != like.device:
        raise ValueError(f"{what} is on {t.device}; all tensors of a call must be on one device, here {like.device}.")
    _check_memory(what, t)


def check_flat(t: torch.Tensor, what: str, numel: int, dtypes: Sequence[torch.dtype], like: torch.Tensor) -> None:
    """Raise ValueError unless ``t`` is contiguous, has ``numel`` elements of one of ``dtypes``, where ``like`` is."""
    if t.dtype not in dtypes or t.numel() != numel or not t.is_contiguous() or t.device != like.device:
        raise ValueError(
            f"{what} is {t.dtype} of shape {tuple(t.shape)} with strides {t.stride()} on {t.device}; it must have "
            f"{numel} elements of {' or '.join(map(str, dtypes))}, be contiguous, and be on {like.device}."
        )


def _check_memory(what: str, t: torch.Tensor) -> None:
    if t.layout is not torch.strided:
        raise ValueError(f"{what} is {t.layout}; it must be dense.")
    if not t.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(t.shape)} has strides {t.stride()}; it must be contiguous: pass .contiguous()."
        )
