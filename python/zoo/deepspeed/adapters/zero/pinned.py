"""``deepspeed.utils.pin_memory`` and its account: page-locked tensors, from :class:`zoo.io.BufferPool`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from zoo.deepspeed.adapters.utilities.logs import logger
from zoo.io import BufferPool

_active: list[NativePinnedMemory] = []
_counted = [0, 0]  # bytes, tensors


class NativePinnedMemory:
    """Page-locked tensors; aligned ones where there is no CUDA, which nothing can lock memory for.

    What is made here has ``ds_pinned`` true until :meth:`unpin`; views of it do not have the attribute, and count as
    pinned all the same. Memory is free when no tensor has it any more.
    """

    def __init__(self) -> None:
        self._pool = BufferPool(1 << 46)
        self._ranges: dict[int, int] = {}
        """First address → address behind the last byte, of what is pinned."""

    def pin_empty(self, example: torch.Tensor, shape: int | Sequence[int]) -> torch.Tensor:
        """(*shape) of the example's dtype, with arbitrary content."""
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        whole: Any = self._pool.empty(math.prod(sizes), dtype=example.dtype)
        # No view, which would keep the memory after its `.data` has gone elsewhere.
        made: Any = torch.empty(0, dtype=example.dtype).set_(
            whole.untyped_storage(), 0, sizes, whole.view(sizes).stride()
        )
        track_pinned_memory(made.nbytes)
        if made.nbytes:
            begin = whole.data_ptr()
            self._ranges[begin] = begin + made.nbytes
            weakref.finalize(whole.untyped_storage(), self._ranges.pop, begin, None)
            made.ds_pin_base = begin
        made.ds_pinned = True
        return made  # type: ignore[no-any-return]

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
        """Whether its memory is pinned by this object, or page-locked by torch; False without memory (meta, fake)."""
        if tensor.device.type != "cpu" or is_fake(tensor):
            return False
        place = tensor.data_ptr()
        return tensor.is_pinned() or any(begin <= place < end for begin, end in list(self._ranges.items()))

    def unpin(self, tensor: Any) -> bool:
        """Give its memory back, as it was pinned, whatever memory ``tensor`` has now; whether it was pinned here.

        The tensor keeps its values, in ordinary memory. Views of it that are still there keep the old memory, which
        counts as pinned no more, and is free when the last of them is gone.
        """
        begin = getattr(tensor, "ds_pin_base", None)
        begin = tensor.data_ptr() if begin is None else begin
        if self._ranges.pop(begin, None) is None:
            return False
        if tensor.data_ptr() == begin:
            tensor.data = tensor.detach().clone()
        tensor.ds_pinned = False
        return True


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
