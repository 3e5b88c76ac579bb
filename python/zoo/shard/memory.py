"""Memory of what comes and goes in every step: gathered parameters, and gradients from backward to the update.

torch's allocator on the CPU asks the system for each large block anew, and every page of it is a fault that clears the
page. Measured on a GPT of 38 M parameters in bf16 at stage 3: 26,000 to 60,000 faults a step, 15 to 35 % of its time.
A pool keeps what was freed for the next bucket, on huge pages where there are some, and starts a buffer at a page,
where a device reaches it without a copy. What is freed refuses whoever has a tensor of it (:func:`refuse_storage`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from zoo import io
from zoo.shard.offload.heap import large_blocks_are_mapped, reuse_large_blocks

THRESHOLD_BYTES = 1 << 20
"""Smaller blocks come from torch's allocator, which keeps them itself."""

REGION_BYTES = 16 << 20

SHARED_BYTES = 8 << 20
"""Smaller gradients come from the pool, which serves gathered parameters too: what the ranks share serves nobody else,
and to copy them to it costs little."""

POOLED_BYTES = 32 << 20
"""Larger buffers are single ones, as of a table: what one leaves fits no other, and goes to the system at once."""

IDLE_BYTES = 64 << 20
"""So much is kept from the end of a step to the next backward: to take it anew costs a fault for each huge page."""

_PAGE = 4096

_SET_ERROR = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_CLEAR_ERROR = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
# Newer torch can make a storage refuse access, and take that back.
CAN_REFUSE_STORAGE = _SET_ERROR is not None and _CLEAR_ERROR is not None

_log = logging.getLogger("zoo.zero")


Room = Callable[[int], torch.Tensor | None]
"""Returns so many bytes of memory, which dies with its last tensor; None where there is none."""


class Memory:
    """Memory from torch's allocator: what is freed goes back to it."""

    def fill(self, storage: torch.UntypedStorage, num_bytes: int, *, room: Room | None = None) -> None:
        """Give an empty ``storage`` this many bytes of arbitrary content; ``storage.resize_(0)`` gives them back.

        ``room``: gives other memory for that, or None.
        """
        storage.resize_(num_bytes)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor of arbitrary content."""
        return torch.empty(numel, dtype=dtype, device=device)

    def pools(self, num_bytes: int) -> bool:
        """Whether what is freed of such a size is kept for the next buffer."""
        return num_bytes <= POOLED_BYTES

    def give_back(self) -> None:
        """A step is over: what lies idle until gradients are reduced again goes to the system, if it is much."""


class StepMemory(Memory):
    """Memory for the buffers of one rank; on other devices than the CPU torch's allocator keeps blocks itself."""

    def __init__(self) -> None:
        self._pools: dict[bool, io.BufferPool] = {}  # for buffers larger than a region, and for the others

    def begin(self) -> None:
        """The buckets are made: steps come now, and free nothing large between small objects that stay."""
        if large_blocks_are_mapped() and lends():
            reuse_large_blocks()  # building the model wanted otherwise

    def fill(self, storage: torch.UntypedStorage, num_bytes: int, *, room: Room | None = None) -> None:
        """See :class:`Memory`."""
        if num_bytes < THRESHOLD_BYTES or storage.device.type != "cpu" or not lends():
            storage.resize_(num_bytes)
            return
        from zoo.kernels.storage import lend

        memory = room(num_bytes) if room is not None and num_bytes >= SHARED_BYTES else None
        if memory is None:
            memory = self._take(num_bytes, torch.uint8)
        if not lend(storage, memory.untyped_storage()):
            raise AssertionError("a storage of the CPU did not take memory.")

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See :class:`Memory`."""
        if numel * dtype.itemsize < THRESHOLD_BYTES or device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        return self._take(numel, dtype)

    def give_back(self) -> None:
        """See :class:`Memory`."""
        stats = [pool.stats() for pool in self._pools.values()]
        if sum(s.reserved_bytes - s.in_use_bytes for s in stats) > IDLE_BYTES:
            for pool in self._pools.values():
                pool.trim()

    def reserved_bytes(self) -> int:
        """What the pools have from the system now, in use or not."""
        return sum(pool.stats().reserved_bytes for pool in self._pools.values())

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.pools(numel * dtype.itemsize):
            memory = torch.empty(numel, dtype=dtype)
            if lends():
                from zoo.kernels.storage import in_huge_pages

                in_huge_pages(memory)
            return memory
        # A small buffer in the region of a large one would keep the next large one out of it.
        large = numel * dtype.itemsize > REGION_BYTES
        if large not in self._pools:
            # A whole number of the first ones, which are those of a layer mostly, or two of its halves.
            size = numel * dtype.itemsize + 2 * _PAGE
            region = REGION_BYTES if large else max(REGION_BYTES // size, 1) * size
            self._pools[large] = io.BufferPool(1 << 46, pinned=False, region_bytes=region)
        return self._pools[large].empty(numel, dtype=dtype)


@functools.cache
def lends() -> bool:
    """Whether storages can be lent memory here, which needs the native library of zoo-kernels; says once if not."""
    try:
        from zoo.kernels import loading
    except ImportError:
        _log.info("zoo-kernels is not installed: large buffers on the CPU are taken from the system in every step")
        return False
    return loading.native()


def refuse_storage(address: int, message: str) -> None:
    """Make every access to this storage's data raise ``message`` (where torch offers it)."""
    if _SET_ERROR is not None and _CLEAR_ERROR is not None:
        _SET_ERROR(address, message)


def allow_storage(address: int) -> None:
    """Undo :func:`refuse_storage`."""
    if _CLEAR_ERROR is not None:
        _CLEAR_ERROR(address)
