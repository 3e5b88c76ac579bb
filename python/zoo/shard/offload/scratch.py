"""A rank's scratch space on NVMe: files without names, cut into regions."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from zoo import io
from zoo.shard.offload.heap import map_large_blocks
from zoo.shard.offload.tiers import OffloadError

if TYPE_CHECKING:
    from zoo.shard.offload.budget import HostBudget


PAGE = 4096
SMALL_BYTES = 1 << 15  # of a transfer that happens although files hold nothing
_SMALLEST_STEP, _LARGEST_STEP = 1 << 26, 1 << 30  # by which a file grows
_TOLD_AFTER_S = 0.1
_log = logging.getLogger("zoo.zero")
_EMPTY: ContextVar[bool] = ContextVar("zoo.shard.offload.scratch", default=False)


@contextlib.contextmanager
def files_hold_nothing() -> Iterator[None]:
    """For dry runs: files that are made in the context take no room, and only what is small is written and read.

    They lie where this machine has temporary files, whatever folder is named. Sizes and traffic are counted as ever.
    """
    token = _EMPTY.set(True)
    try:
        yield
    finally:
        _EMPTY.reset(token)


def round_up(num_bytes: int) -> int:
    """To whole pages: what a device reaches without a copy."""
    return -(-num_bytes // PAGE) * PAGE


class Lease:
    """A region that keeps its content until :meth:`release`: whoever wants to write to it waits. For any thread."""

    def __init__(self, nvme_file: NvmeFile, region: int, offset: int) -> None:
        self._nvme_file, self._region, self._offset = nvme_file, region, offset
        self._held = True

    def read(self, memory: torch.Tensor, offset: int) -> None:
        """Fill ``memory``, bytes, from byte ``offset`` of what was lent."""
        self._nvme_file.read_lent(self._region, memory, self._offset + offset)

    def release(self) -> None:
        """It may be written to again. A second time has no effect."""
        if self._held:
            self._held = False
            self._nvme_file.take_back(self._region)


class NvmeFile:
    """A file that is cut into regions, which are read and written as tensors.

    The file has no name any more once it is open: its space is free again when the process ends, however that happens.
    A device may answer in any order; a region is not read while something of it is being written, and not written to
    while it is lent, to a checkpoint that another thread writes.
    """

    def __init__(self, handle: io.Handle, folder: Path, name: str, sizes: list[int]) -> None:
        self._handle, self.what = handle, name
        self.read_bytes = self.written_bytes = 0  # since it was made
        # Writes that nobody has waited for yet, or that failed, and their regions.
        self._writing: dict[io.Future, int] = {}
        self._lent: dict[int, int] = {}  # leases by region
        self._returned = threading.Condition()
        self.offsets, self._end = [], 0
        for size in sizes:
            self.offsets.append(self._end)
            self._end += round_up(size)
        self.num_bytes = self._end
        path = folder / f"zoo-{name}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._folder, self._where, self._empty = folder, f"{name} in {str(folder)!r}", _EMPTY.get()
        try:
            self._descriptor = _allocate(path, self._end, empty=self._empty)
            self._closes = weakref.finalize(self, os.close, self._descriptor)
            self._writer = handle.open(path, "w")
            self._reader = handle.open(path, "r")
        except (OSError, RuntimeError) as error:
            raise OffloadError(_why(error, name, folder, self._end)) from error
        finally:
            path.unlink(missing_ok=True)

    def add(self, num_bytes: int) -> int:
        """A new region; the file doubles, or grows by a step, when it is full."""
        self.offsets.append(self._end)
        self._end += round_up(num_bytes)
        if self._end > self.num_bytes:
            size = max(self._end, self.num_bytes + min(max(self.num_bytes, _SMALLEST_STEP), _LARGEST_STEP))
            try:
                _take(self._descriptor, self.num_bytes, size - self.num_bytes, empty=self._empty)
            except OSError as error:
                raise OffloadError(_why(error, self.what, self._folder, size)) from error
            self.num_bytes = size
        return len(self.offsets) - 1

    @property
    def gds(self) -> bool:
        """Whether tensors of a GPU may be read and written."""
        return self._handle.gds

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> io.Future:
        """Begin filling ``tensor`` from byte ``offset`` of a region; ``urgent``: before what waits at the device."""
        for future in self._writes_to(region):
            self.finish(future)
        self.read_bytes += tensor.nbytes
        tensor = self._moved(tensor)
        return self._handle.async_pread(tensor, self._reader, self.offsets[region] + offset, urgent=urgent)

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> io.Future:
        """Begin writing ``tensor`` at byte ``offset`` of a region; ``urgent``: all writes to a region are, or none."""
        self._wait_for_leases(region)
        self.written_bytes += tensor.nbytes
        tensor = self._moved(tensor)
        future = self._handle.async_pwrite(tensor, self._writer, self.offsets[region] + offset, urgent=urgent)
        for older in self._writes_to(region):
            if older.done():  # whether it failed is known to who waits for it
                del self._writing[older]
        self._writing[future] = region
        return future

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten()[:0] if self._empty and tensor.nbytes > SMALL_BYTES else tensor

    # Lent to another thread ------------------------------------------------------------------------------------------

    def lend(self, region: int, offset: int = 0) -> Lease:
        """From byte ``offset`` on, as it is now; writes that are under way are finished first."""
        for future in self._writes_to(region):
            self.finish(future)
        with self._returned:
            self._lent[region] = self._lent.get(region, 0) + 1
        return Lease(self, region, offset)

    def lender(self, region: int, first: int) -> Callable[[int], Lease]:
        """What lends the region from a byte on, counted from byte ``first`` of it."""
        return lambda offset: self.lend(region, first + offset)

    def read_lent(self, region: int, memory: torch.Tensor, offset: int) -> None:
        """See :meth:`Lease.read`."""
        try:
            self._handle.async_pread(memory, self._reader, self.offsets[region] + offset).wait()
        except (OSError, RuntimeError, MemoryError) as error:
            raise OffloadError(f"offloaded state cannot be read for a checkpoint: {self._where}: {error}") from error

    def take_back(self, region: int) -> None:
        """See :meth:`Lease.release`."""
        with self._returned:
            self._lent[region] -= 1
            if not self._lent[region]:
                del self._lent[region]
                self._returned.notify_all()

    def _wait_for_leases(self, region: int | None = None) -> None:
        """Until a region, or none, is lent."""
        if not self._lent:
            return
        began = time.perf_counter()
        with self._returned:
            self._returned.wait_for(lambda: not (self._lent if region is None else region in self._lent))
        waited = time.perf_counter() - began
        if waited > _TOLD_AFTER_S:
            _log.info("%s have waited %.1f s for a checkpoint that was being written", self.what, waited)

    def _writes_to(self, region: int) -> list[io.Future]:
        return [future for future, where in self._writing.items() if where == region]

    def drop(self, region: int) -> None:
        """What a region holds is needed no longer. Its space is free when the file is closed."""

    def forget(self) -> None:
        """What was written is of no use any more, nor whether it got there."""
        self._writing.clear()

    def finish(self, future: io.Future) -> None:
        """Wait for an operation; a failure names what it was about."""
        try:
            future.wait()
        except (OSError, RuntimeError, MemoryError) as error:
            raise OffloadError(
                f"offloaded state was lost: {self._where}: {error}. Free or replace the device and continue from the "
                "last checkpoint (load_state)."
            ) from error
        self._writing.pop(future, None)

    def close(self) -> None:
        """Give the space back."""
        self._wait_for_leases()
        self._writer.close()
        self._reader.close()
        self._closes()


def _take(descriptor: int, offset: int, num_bytes: int, *, empty: bool) -> None:
    """A file has so many bytes from an offset on; unless it is empty, their space is taken."""
    if empty:
        os.ftruncate(descriptor, offset + num_bytes)
    else:
        os.posix_fallocate(descriptor, offset, num_bytes)


def _allocate(path: Path, num_bytes: int, *, empty: bool = False) -> int:
    """A new file of this size, open; its space is taken, if it is not empty."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        if num_bytes:
            _take(descriptor, 0, num_bytes, empty=empty)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _why(error: OSError | RuntimeError, name: str, folder: Path, num_bytes: int) -> str:
    number = error.errno if isinstance(error, OSError) else None
    less = "use more ranks, or offload less (ratio, max_in_cpu)."
    if number == errno.ENOSPC:
        free = shutil.disk_usage(folder).free
        return (
            f"nvme_path={str(folder)!r} has {free:,} bytes free, and {name} of this rank take {num_bytes:,}. Free "
            f"space, choose another nvme_path, {less}"
        )
    if number in (errno.EDQUOT, errno.EFBIG):
        limit = (
            "quota of this user" if number == errno.EDQUOT else "limit of a file's size (ulimit -f, or the device's)"
        )
        return (
            f"nvme_path={str(folder)!r}: {name} of this rank take {num_bytes:,} bytes, more than the {limit} allows. "
            f"Raise it, choose another nvme_path, {less}"
        )
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"nvme_path={str(folder)!r} cannot be written to ({os.strerror(number)}); choose a directory that can."
    return f"nvme_path={str(folder)!r} cannot be used for {name}: {error}"


def handle_of(aio: io.AioConfig | io.Handle | None, **options: Any) -> tuple[io.Handle, bool]:
    """The engine that a user gave, or a new one of these settings and options; and whether it is ours to close."""
    if isinstance(aio, io.Handle):
        return aio, False
    return io.Handle.from_config(aio or io.AioConfig(), **options), True


class Scratch:
    """The engine, the buffers and the folders of one rank's offloaded state.

    Under a cap memory is scarce, and where gathered parameters and gradients do not come from a pool they tear the heap
    to pieces: large blocks of the process then go back to the system when they are freed (heap.py).

    Args:
        budget: the account of this node's host memory; None for no cap.
        handle: the engine; it is closed with the rest if it is ``owned``.
    """

    def __init__(
        self, handle: io.Handle, *, owned: bool, budget: HostBudget | None = None, pinned: bool = False
    ) -> None:
        from zoo.shard.memory import lends  # that file stands on this package

        if budget is not None or not lends():
            map_large_blocks()
        self._budget = budget
        kind: Literal["auto", False] = "auto" if pinned else False
        if budget is None:
            self.pool = io.BufferPool(1 << 46, pinned=kind)
        else:
            self.pool = io.BufferPool(
                budget.capacity_bytes, pinned=kind, region_bytes=budget.region_bytes, ledger=budget.ledger
            )
        self.handle, self._owned = handle, owned
        self._nvme_files: list[NvmeFile] = []

    def nvme_file(self, folder: Path | None, name: str, sizes: list[int]) -> NvmeFile:
        """A new file in ``folder`` with a region of each of these sizes in bytes."""
        if _EMPTY.get():
            folder = Path(tempfile.gettempdir())
        if folder is None:
            raise ValueError(f'offloading to "nvme" needs nvme_path: a directory on the device, for {name}.')
        if not folder.is_dir():
            kind = "is not a directory" if folder.exists() else "does not exist"
            raise OffloadError(f"nvme_path={str(folder)!r} {kind}; make it, or name a directory on the device.")
        made = NvmeFile(self.handle, folder, name, sizes)
        self._nvme_files.append(made)
        return made

    def drop(self, nvme_file: NvmeFile) -> None:
        """A file is needed no longer: its space is free."""
        self._nvme_files.remove(nvme_file)
        nvme_file.close()

    def check_room(self, num_bytes: int) -> None:
        """Raise OffloadError unless buffers of so many bytes, and what other ranks ask for, fit under each node's cap.

        Collective if there is a cap: all ranks raise or none. What is not in use goes back to the account first; then
        ranks that share a cap set so much aside, and none of them depends on what the others take later.
        """
        if self._budget is not None:
            self.pool.trim()
            self._budget.check(self.pool.stats().in_use_bytes, num_bytes)
            self._budget.set_aside(self.pool, num_bytes)

    def nvme_bytes(self) -> int:
        """Bytes of all files."""
        return sum(nvme_file.num_bytes for nvme_file in self._nvme_files)

    def traffic(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        return sum(s.read_bytes for s in self._nvme_files), sum(s.written_bytes for s in self._nvme_files)

    def close(self) -> None:
        """Give files and threads back."""
        for nvme_file in self._nvme_files:
            nvme_file.close()
        self._nvme_files.clear()
        if self._owned and not self.handle.closed:
            self.handle.close()


IN_FLIGHT = 4
"""Writes under way to the device before the next one waits for the oldest."""


class WriteBehind:
    """A store (:class:`~zoo.shard.roles.Store`) over the regions of ``nvme_file``, for whose writes nobody waits: of
    reduced gradients, which backward makes and the update reads.

    A write is finished before the same region is used again; what is written must not be changed any more.
    """

    def __init__(self, nvme_file: NvmeFile) -> None:
        self._nvme_file = nvme_file
        self._under_way: dict[int, io.Future] = {}
        self._lost: set[int] = set()
        self._order: deque[int] = deque()

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> None:
        """Begin writing at byte ``offset``; a failure shows when the region is read."""
        self.drop(region)
        while len(self._order) >= IN_FLIGHT:
            self._settle(self._order[0])
        self._under_way[region] = self._nvme_file.write(region, tensor, offset)
        self._order.append(region)

    def _settle(self, region: int) -> None:
        """Wait for the write of a region, if one is under way."""
        future = self._under_way.pop(region, None)
        if future is not None:
            self._order.remove(region)
            self._lost.add(region)
            self._nvme_file.finish(future)
            self._lost.discard(region)

    def drop(self, region: int) -> None:
        """What a region holds is needed no longer."""
        if region in self._under_way:
            with contextlib.suppress(OffloadError):
                self._settle(region)
        self._lost.discard(region)

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> io.Future:
        """Begin filling ``tensor`` from byte ``offset`` of a region."""
        self._settle(region)
        if region in self._lost:
            raise OffloadError("a reduced gradient was lost when the device failed; zero_grad() and go through the "
                               "backward again.")  # fmt: skip
        return self._nvme_file.read(region, tensor, offset)

    def finish(self, future: io.Future | None) -> None:
        """Wait for a read."""
        if future is not None:
            self._nvme_file.finish(future)

    @staticmethod
    def buffer_bytes(largest: int) -> int:
        """Host memory that what is written, of at most ``largest`` bytes each, takes on its way."""
        return (IN_FLIGHT + 2) * round_up(largest)
