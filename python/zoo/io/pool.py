"""Tensors in aligned memory, from a pool that never grows past its cap."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from zoo.io import _native
from zoo.io.checks import whole_number
from zoo.io.errors import PoolExhaustedError, UnavailableError
from zoo.io.ledger import Ledger
from zoo.io.memory import num_bytes_of
from zoo.io.notices import once

DEFAULT_CAPACITY_BYTES = 4 << 30
DEFAULT_REGION_BYTES = 64 << 20
_MOST_BYTES = 1 << 62
_T = TypeVar("_T")


class PoolStats(NamedTuple):
    """Counts of a `BufferPool`."""

    capacity_bytes: int
    """Hard cap of ``reserved_bytes``."""
    reserved_bytes: int
    """Taken from the system; kept for the next buffers."""
    in_use_bytes: int
    """In living tensors and of those that a device has not passed yet, rounded to whole pages of 4096."""
    peak_bytes: int
    """Largest ``in_use_bytes`` so far."""
    buffers: int
    """Living tensors."""
    allocations: int
    """Tensors made so far."""
    regions: int
    """Pieces of memory the reserved bytes lie in."""


class Event(Protocol):
    """A point in the work of a device, such as a recorded ``torch.cuda.Event``. Asked by whoever uses the pool next."""

    def query(self) -> bool:
        """Whether the device has passed it; does not wait."""

    def synchronize(self) -> object:
        """Wait until it has."""


class _Lent:
    """Memory that devices still read or write, each with the event after which they do not."""

    def __init__(self) -> None:
        self._uses: deque[tuple[torch.UntypedStorage, Event]] = deque()
        self._lock = threading.RLock()  # re-entrant: what is freed while it is held may come back here
        self._process = os.getpid()

    def __bool__(self) -> bool:
        # In a forked process the lock may be held for ever, and the device's work is the parent's.
        return bool(self._uses) and self._process == os.getpid()

    def add(self, storage: torch.UntypedStorage, event: Event) -> None:
        with self._lock:
            self._uses.append((storage, event))

    def sweep(self) -> None:
        """Let go of what devices have passed."""
        if not self:
            return
        with self._lock:
            for _ in range(len(self._uses)):
                use, passed = self._uses.popleft(), False
                try:
                    passed = use[1].query()
                finally:
                    if not passed:
                        self._uses.append(use)

    def wait_for_oldest(self) -> bool:
        """Wait for one and let go of it; whether there was one."""
        if not self:
            return False
        with self._lock:
            if not self._uses:
                return False
            use = self._uses[0]
            use[1].synchronize()  # where this fails nothing is let go of
            if self._uses and self._uses[0] is use:
                self._uses.popleft()
            return True


def _settle(lent: _Lent) -> None:
    """The memory is unmapped when its last tensor dies: not before devices have passed it."""
    while lent.wait_for_oldest():
        pass


class BufferPool:
    """Makes tensors whose memory starts at a page, so that a device reaches it without a copy.

    The memory of a tensor returns to the pool when the last tensor that shares it has died and devices have passed the
    events recorded for it (`record_event`). A sequence of buffers that repeats, step after step, takes nothing new from
    the system. With a CUDA runtime and device the memory is page-locked (``cudaHostRegister``), so that copies to and
    from the GPU are asynchronous. A forked child has none of the memory: tensors of the pool must not be touched there.

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
        whole_number("capacity_bytes", capacity_bytes, 4096, _MOST_BYTES)
        whole_number("region_bytes", region_bytes, 4096, _MOST_BYTES)
        if pinned not in (True, False, "auto"):
            raise ValueError(f'pinned = {pinned!r}; allowed are True, False and "auto"')
        problem = _native.cuda_problem() if pinned else None
        if problem is not None:
            if pinned is True:
                raise UnavailableError(f"page-locked memory was demanded and cannot be had: {problem}")
            once(f"buffers are aligned but not page-locked: {problem}", level="info")
        account = None if ledger is None else ledger.native
        self._pool = _native.Pool(capacity_bytes, bool(pinned) and problem is None, region_bytes, account)
        self._lent = _Lent()
        weakref.finalize(self, _settle, self._lent)

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
        given: Any = dtype
        if not isinstance(given, torch.dtype):
            raise TypeError(f"dtype = {dtype!r}; allowed is a torch.dtype, such as torch.float32")
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape {sizes}; sizes are 0 or more")
        count = math.prod(sizes)
        # An empty tensor's storage could not give its memory back: nothing marks its end.
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        num_bytes = count * num_bytes_of(dtype)
        if num_bytes > _MOST_BYTES:
            raise PoolExhaustedError(
                f"a tensor of shape {sizes} and {dtype} has {num_bytes} bytes; no pool has more than {_MOST_BYTES}"
            )
        raw: Any = from_dlpack(self._patiently(self._pool.take, num_bytes))
        tensor: torch.Tensor = raw.view(dtype).view(sizes)
        return tensor

    def _patiently(self, take: Callable[[int], _T], num_bytes: int) -> _T:
        self._lent.sweep()
        while True:
            try:
                return take(num_bytes)
            except PoolExhaustedError:
                if not self._lent.wait_for_oldest():
                    raise

    def record_event(self, tensor: torch.Tensor, event: Event) -> None:
        """The tensor's memory is used by a device until ``event``: its tensors may die before, and then it is kept.

        Whoever begins an asynchronous copy between a tensor of the pool and a device records an event behind the copy
        and calls this, as ``Tensor.record_stream`` does for memory of a GPU. Whoever takes memory next asks the event
        without waiting, and waits only where nothing else fits under the cap.

        Raises:
            ValueError: the tensor's memory is not the pool's.
        """
        if not self.owns(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not of this pool, which has nothing to "
                "keep then; allowed are tensors that its empty() made, and views of them"
            )
        self._lent.sweep()
        self._lent.add(tensor.untyped_storage(), event)

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
        whole_number("num_bytes", num_bytes, 1, _MOST_BYTES)
        self._patiently(self._pool.set_aside, num_bytes)

    def trim(self) -> None:
        """Give memory that no tensor uses, and that is not set aside, back to the system."""
        self._lent.sweep()
        self._pool.trim()

    def stats(self) -> PoolStats:
        """Counts of now."""
        self._lent.sweep()
        return PoolStats(**self._pool.stats())

    def __repr__(self) -> str:
        stats = self.stats()
        kind = "page-locked" if self.pinned else "aligned"
        return f"BufferPool({stats.in_use_bytes} of {stats.capacity_bytes} bytes in use, {kind})"
