"""``deepspeed.utils.pin_memory`` and its account: page-locked tensors, from :class:`zoo.io.BufferPool`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from zoo.deepspeed.adapters.logs import logger
from zoo.io import BufferPool

_active: list[NativePinnedMemory] = []
_counted = [0, 0]  # bytes, tensors


class NativePinnedMemory:
    """Page-locked tensors; aligned ones where there is no CUDA, which nothing can lock memory for."""

    def __init__(self) -> None:
        self._pool = BufferPool(1 << 46)

    def pin_empty(self, example: torch.Tensor, shape: int | Sequence[int]) -> torch.Tensor:
        """(*shape) of the example's dtype, with arbitrary content."""
        made = self._pool.empty(shape, dtype=example.dtype)
        track_pinned_memory(made.nbytes)
        return made

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A tensor of the same dtype and number of elements.

        Args:
            make_copy: with the same values; otherwise with arbitrary ones.
            match_shape: of the same shape; otherwise flat.
        """
        made = self.pin_empty(tensor, tuple(tensor.shape) if match_shape else math.prod(tensor.shape))
        if make_copy:
            made.copy_(tensor.detach().view(made.shape) if match_shape else tensor.detach().reshape(-1))
        return made

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is of this object, or page-locked by torch."""
        return tensor.is_pinned() or self._pool.owns(tensor)

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is of this object; it is free when no tensor has it any more."""
        return self._pool.owns(tensor)


def get_native_pinned_memory() -> NativePinnedMemory:
    """The one of this process, made when it is first asked for."""
    if not _active:
        _active.append(NativePinnedMemory())
    return _active[0]


def get_active_native_pinned_memory() -> NativePinnedMemory | None:
    """The one of this process; None while nobody has asked for it."""
    return _active[0] if _active else None


def track_pinned_memory(num_bytes: int) -> None:
    """Add a tensor of so many bytes to the account, which :func:`pinned_memory_summary` writes into the log."""
    _counted[0] += int(num_bytes)
    _counted[1] += 1


def pinned_memory_summary(tag: str = "") -> None:
    """Write into the log what was counted so far."""
    logger.info(
        "%spage-locked memory: %.3f GiB in %d tensors since the start",
        f"{tag}: " if tag else "", _counted[0] / 2**30, _counted[1],
    )  # fmt: skip
