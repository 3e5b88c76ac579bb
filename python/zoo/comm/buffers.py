"""What the buffers of a collective have to be: looked at before anything is sent, so that no rank sends alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_contiguous(op: str, tensor: torch.Tensor, name: str = "tensor") -> None:
    """Raise ValueError for a tensor with gaps: backends would send, or overwrite, what lies in between."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op} got {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}, which is not contiguous: "
            "give .contiguous(), and copy back what arrives in it."
        )


def check_pair(op: str, one: torch.Tensor, other: torch.Tensor, names: tuple[str, str]) -> None:
    """Raise ValueError unless both are contiguous, of one dtype and on one device."""
    if one.dtype is not other.dtype or one.device != other.device:
        raise ValueError(
            f"{op} got {names[0]} of {one.dtype} on {one.device} and {names[1]} of {other.dtype} on {other.device}; "
            "the two have one dtype and device."
        )
    check_contiguous(op, one, names[0])
    check_contiguous(op, other, names[1])


def flat_pair(
    op: str, full: torch.Tensor, chunk: torch.Tensor, size: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``full`` (N*n,) and this rank's ``chunk`` (n,) of a collective of N = ``size`` ranks, as flat views.

    Raises:
        ValueError: sizes that do not fit, two dtypes or devices, or a tensor that is not contiguous.
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
