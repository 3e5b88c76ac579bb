"""Tensors in aligned memory, from a pool that never grows past its cap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from zoo.io import _native
from zoo.io.checks import whole_number
from zoo.io.errors import UnavailableError
from zoo.io.ledger import Ledger
from zoo.io.memory import num_bytes_of
from zoo.io.notices import once

DEFAULT_CAPACITY_BYTES = 4 << 30
DEFAULT_REGION_BYTES = 64 << 20


class PoolStats(NamedTuple):
    """Counts of a `BufferPool`."""

    capacity_bytes: int
    """Hard cap of ``reserved_bytes``."""
    reserved_bytes: int
    """Taken from the system; kept for the next buffers."""
    in_use_bytes: int
    """In living tensors, rounded to whole pages of 4096."""
    peak_bytes: int
    """Largest ``in_use_bytes`` so far."""
    buffers: int
    """Living tensors."""
    allocations: int
    """Tensors made so far."""
    regions: int
    """Pieces of memory the reserved bytes lie in."""


class BufferPool:
    """Makes tensors whose memory starts at a page, so that a device reaches it without a copy.

    The memory of a tensor returns to the pool when the last tensor that shares it dies. A sequence of buffers that
    repeats, step after step, takes nothing new from the system. With a CUDA runtime and device the memory is
    page-locked (``cudaHostRegister``), so that copies to and from the GPU are asynchronous. A forked child has none of
    the memory: tensors of the pool must not be touched there.

    Args:
        capacity_bytes: hard cap, at least 4096.
        pinned: ``"auto"`` page-locks where there is CUDA and elsewhere logs once why not; True demands it; False does
            not.
        region_bytes: how much is taken from the system at a time; a larger buffer gets a region of its own.
        ledger: an account that pools of other processes share: what is taken from the system is reserved there first.

    Raises:
        ValueError: a cap or region that is too small.
        UnavailableError: page-locked memory was demanded and there is no CUDA runtime or device.
    """

    def __init__(
        self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, *, pinned: bool | Literal["auto"] = "auto",
        region_bytes: int = DEFAULT_REGION_BYTES, ledger: Ledger | None = None,
    ) -> None:  # fmt: skip
        whole_number("capacity_bytes", capacity_bytes, 4096, 1 << 62)
        whole_number("region_bytes", region_bytes, 4096, 1 << 62)
        if pinned not in (True, False, "auto"):
            raise ValueError(f'pinned = {pinned!r}; allowed are True, False and "auto"')
        problem = _native.cuda_problem() if pinned else None
        if problem is not None:
            if pinned is True:
                raise UnavailableError(f"page-locked memory was demanded and cannot be had: {problem}")
            once(f"buffers are aligned but not page-locked: {problem}", level="info")
        account = None if ledger is None else ledger.native
        self._pool = _native.Pool(capacity_bytes, bool(pinned) and problem is None, region_bytes, account)

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
        return self._pool.page_locked

    def empty(self, shape: int | Sequence[int], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A contiguous CPU tensor with arbitrary content, like ``torch.empty``.

        Raises:
            PoolExhaustedError: it does not fit under the cap, or into what the ledger has left; the message says what
                is in use.
            ValueError: a negative size.
            RuntimeError: in a forked child.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape {sizes}; sizes are 0 or more")
        count = math.prod(sizes)
        # An empty tensor's storage could not give its memory back: nothing marks its end.
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        raw: Any = from_dlpack(self._pool.take(count * num_bytes_of(dtype)))
        tensor: torch.Tensor = raw.view(dtype).view(sizes)
        return tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory belongs to this pool."""
        return tensor.device.type == "cpu" and self._pool.owns(tensor.data_ptr())

    def set_aside(self, num_bytes: int) -> None:
        """Take so many bytes in one region and keep them for tensors to come, whatever other pools take meanwhile.

        Pages take no memory before they are touched, unless they are page-locked.

        Raises:
            PoolExhaustedError: see :meth:`empty`.
            ValueError: less than one byte.
        """
        whole_number("num_bytes", num_bytes, 1, 1 << 62)
        self._pool.set_aside(num_bytes)

    def trim(self) -> None:
        """Give memory that no tensor uses, and that is not set aside, back to the system."""
        self._pool.trim()

    def stats(self) -> PoolStats:
        """Counts of now."""
        return PoolStats(**self._pool.stats())

    def __repr__(self) -> str:
        stats = self.stats()
        kind = "page-locked" if self.pinned else "aligned"
        return f"BufferPool({stats.in_use_bytes} of {stats.capacity_bytes} bytes in use, {kind})"
