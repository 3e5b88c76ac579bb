"""What the buffers of a collective have to be: looked at before anything is sent, so that no rank sends alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_KNOWN = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128,
})  # fmt: skip


def is_known(dtype: torch.dtype) -> bool:
    """Whether backends take tensors of this dtype: not those of int16, uint16, fp8 and other rare ones."""
    return dtype in _KNOWN


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, contiguous, as something that every backend moves: as bytes where it does not know the dtype."""
    if tensor.dtype in _KNOWN:
        return tensor
    return (tensor if tensor.ndim > 1 else tensor.view(-1, 1)).view(torch.uint8)


def check_contiguous(op: str, tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise ValueError for a tensor with gaps: backends would send, or overwrite, what lies in between."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{op} got a {type(tensor).__name__} as {name}; it takes a tensor.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op} got {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is not contiguous: "
            "give .contiguous(), and copy back what arrives in it."
        )


def check_pair(
    op: str, one: torch.Tensor, other: torch.Tensor, names: tuple[str, str], *, apart: bool = False
) -> None:  # fmt: skip
    """Raise ValueError unless both are contiguous, of one dtype and on one device; ``apart``: and share no memory."""
    if one.dtype is not other.dtype or one.device != other.device:
        raise ValueError(
            f"{op} got {names[0]} of {one.dtype} on {one.device} and {names[1]} of {other.dtype} on {other.device}; "
            "the two have one dtype and device."
        )
    check_contiguous(op, one, names[0])
    check_contiguous(op, other, names[1])
    first, second = one.data_ptr(), other.data_ptr()
    if apart and 0 < first < second + other.nbytes and second < first + one.nbytes:
        raise ValueError(
            f"{op} got {names[0]} and {names[1]} that share memory; what arrives would overwrite what is still to be "
            f"sent: give another tensor as {names[0]}."
        )


def flat_pair(
    op: str, full: torch.Tensor, chunk: torch.Tensor, size: int, name: str, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """``full`` (N*n,) and this rank's ``chunk`` (n,) of a collective of N = ``size`` ranks, as flat views.

    Raises:
        ValueError: sizes that do not fit, two dtypes or devices, a tensor that is not contiguous, or whole numbers that
            a ``scale`` would make into others.
    """
    fits = full.numel() == size * chunk.numel()
    # All at once: this comes before every collective, and nearly always all is well.
    if not (
        fits and full.dtype is chunk.dtype and full.is_contiguous() and chunk.is_contiguous()
        and full.device == chunk.device
    ):  # fmt: skip
        if not fits:
            raise ValueError(
                f"{op} got full with {full.numel()} elements and {name} with {chunk.numel()} on {size} ranks; full has "
                f"{size} times as many as {name}: {size * chunk.numel()}."
            )
        check_pair(op, full, chunk, ("full", name))
    if scale != 1.0 and not (full.is_floating_point() or full.is_complex()):
        raise ValueError(
            f"{op} got scale={scale} for {full.dtype}; whole numbers are only summed: leave scale out, and divide what "
            "arrives as you like."
        )
    if full.requires_grad or chunk.requires_grad:  # what travels is memory, and no step of autograd
        full, chunk = full.data, chunk.data
    return full if full.ndim == 1 else full.view(-1), chunk if chunk.ndim == 1 else chunk.view(-1)


def check_rows(op: str, out: torch.Tensor, given: torch.Tensor) -> None:
    """Raise ValueError unless the rows of both have one shape."""
    if out.shape[1:] != given.shape[1:]:
        raise ValueError(
            f"{op} got out with rows of shape {tuple(out.shape[1:])} and given with rows of shape "
            f"{tuple(given.shape[1:])}; rows keep their shape."
        )


def check_splits(op: str, size: int, *sides: tuple[str, torch.Tensor, Sequence[int]]) -> None:
    """Raise ValueError unless each side's tensor has a number of rows for each of ``size`` ranks, which sum to its own.

    Args:
        sides: (name, tensor, rows of each rank).
    """
    for side, tensor, splits in sides:
        if len(splits) != size or sum(splits) != len(tensor) or min(splits) < 0:
            raise ValueError(
                f"{op} got {side}_splits={list(splits)} for {len(tensor)} rows on {size} ranks; it takes {size} "
                f"numbers of rows that sum to {len(tensor)}."
            )
