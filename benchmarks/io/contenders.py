"""Who reads and writes. A contender opens a session at one setting; a session moves a tensor's bytes.

zoo's sessions are in ``zoo_contenders.py``, fio's jobs in ``fio.py``; the peers that run in Python are here.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from benchmarks.common import refuse_standin
from benchmarks.io.files import fsync, write_all
from benchmarks.io.points import Point


class Session(Protocol):
    """Called by the worker, in one thread. Tensors are uint8 and contiguous."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """The memory that this contender is measured with."""

    def write(self, tensor: torch.Tensor, path: Path, *, new: bool) -> None:
        """Write the tensor's bytes to the start of the file: over what it holds, or (``new``) to a file not there yet.

        On return the bytes are on the device; ``new`` asks for the metadata too.
        """

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """Read into the tensor from the start of the file; returns where the bytes are."""

    def close(self) -> None:
        """Free everything."""


class AsyncSession(Session, Protocol):
    """A session that can also keep operations in flight, for the GIL section."""

    def submit(self, op: str, tensor: torch.Tensor, path: Path, offset: int) -> Any:
        """Start a "read" or a "write" and return at once, with a token."""

    def finish(self, tokens: deque[Any]) -> None:
        """Wait for the oldest token at least, and take out of ``tokens`` all that are known to be done."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """What is measured and how it is told.

    ``engine``: fio's engine for fio's jobs, ``huge_pages``: their memory. ``varies``: settings searched beside block
    size and depth, None where there is nothing to search. ``follows``: the contender whose best setting it runs at.
    ``asynchronous``: the GIL section has it. ``needs``: a library that may be missing. ``pt_file``: it reads a file of
    torch.save's. ``page_cache`` and ``durable`` say what its bytes go through and when they are safe.
    """

    label: str
    buffer: str
    page_cache: str
    durable: str
    open: Callable[[Point], Session] | None = None
    engine: str | None = None
    huge_pages: bool = False
    varies: tuple[str, ...] | None = None
    follows: str | None = None
    asynchronous: bool = False
    needs: str = ""
    pt_file: bool = False


DIRECT = "O_DIRECT: around it, both ways"
BUFFERED = "through it; reads start with none of the file in it"
ON_DEVICE = "on the device when it returns; a new file is fsynced in the timed part"
FSYNCED = "os.fsync in the timed part, always"


def ordinary(num_bytes: int) -> torch.Tensor:
    """A tensor as torch allocates it: its address is 64 modulo 4096 for sizes like these, so O_DIRECT cannot use it."""
    return torch.empty(num_bytes, dtype=torch.uint8)


class DeepSpeedSession:
    """DeepSpeed's aio_handle (libaio, O_DIRECT)."""

    def __init__(self, point: Point, *, pinned: bool) -> None:
        refuse_standin()
        from deepspeed.ops.op_builder import AsyncIOBuilder

        module = AsyncIOBuilder().load(verbose=False)
        self.handle = module.aio_handle(
            block_size=point.block_size,
            queue_depth=point.queue_depth,
            single_submit=False,
            overlap_events=point.overlap_events,
            intra_op_parallelism=point.num_threads,
        )
        self.pinned = pinned
        self.locked: list[torch.Tensor] = []

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Its own page-locked memory, or torch's."""
        if not self.pinned:
            return ordinary(num_bytes)
        self.locked.append(self.handle.new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8)))
        return self.locked[-1]

    def write(self, tensor: torch.Tensor, path: Path, *, new: bool) -> None:
        """``sync_pwrite``."""
        if self.handle.sync_pwrite(tensor, str(path), 0) != 1:
            raise OSError(f"aio_handle.sync_pwrite of {path.name} failed")
        if new:
            fsync(path)

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """``sync_pread``."""
        if self.handle.sync_pread(tensor, str(path), 0) != 1:
            raise OSError(f"aio_handle.sync_pread of {path.name} failed")
        return tensor

    def submit(self, op: str, tensor: torch.Tensor, path: Path, offset: int) -> Any:
        """``async_pread`` and ``async_pwrite``."""
        start = self.handle.async_pread if op == "read" else self.handle.async_pwrite
        if start(tensor, str(path), offset) != 0:
            raise OSError(f"aio_handle.async_p{op} of {path.name} failed")
        return offset

    def finish(self, tokens: deque[Any]) -> None:
        """``wait``, which waits for all."""
        if self.handle.wait() != len(tokens):
            raise OSError("aio_handle.wait counted another number of operations than were started")
        tokens.clear()

    def close(self) -> None:
        """Give the page-locked memory back."""
        for tensor in self.locked:
            self.handle.free_cpu_locked_tensor(tensor)
        self.locked.clear()
        del self.handle


class PythonSession:
    """``open(..., buffering=0)``, ``write`` and ``readinto``."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """torch's."""
        return ordinary(num_bytes)

    def write(self, tensor: torch.Tensor, path: Path, *, new: bool) -> None:
        """``write`` of a memoryview, then ``os.fsync``."""
        with path.open("wb" if new else "r+b", buffering=0) as file:
            write_all(file.fileno(), memoryview(tensor.numpy()))
            os.fsync(file.fileno())

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """``readinto`` until the tensor is full."""
        view = memoryview(tensor.numpy())
        with path.open("rb", buffering=0) as file:
            while view:
                num_read = file.readinto(view)
                if not num_read:
                    raise OSError(f"{path.name} ended {len(view)} bytes early")
                view = view[num_read:]
        return tensor

    def close(self) -> None:
        """Nothing is open."""


class TorchSession(PythonSession):
    """``torch.save`` and ``torch.load``."""

    def write(self, tensor: torch.Tensor, path: Path, *, new: bool) -> None:
        """To the path where the file is new; through a file object where blocks are to be overwritten, not freed."""
        if tensor.nbytes < tensor.untyped_storage().nbytes():
            tensor = tensor.clone()  # torch.save would write all of the storage behind a view
        if new:
            torch.save(tensor, path)
            fsync(path)
            return
        with path.open("r+b", buffering=0) as file:
            torch.save(tensor, file)
            os.fsync(file.fileno())

    def read(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        """Into memory of its own."""
        loaded: torch.Tensor = torch.load(path, weights_only=True, mmap=False)
        return loaded


def _fio(engine: str, *, huge_pages: bool) -> Contender:
    return Contender(
        label=f"fio, {engine}" + (", huge pages" if huge_pages else ""), engine=engine, huge_pages=huge_pages,
        varies=("fixed",) if engine == "io_uring" else (), page_cache=DIRECT, durable=ON_DEVICE,
        buffer="fio's own: block size x depth bytes, used again and again"
        + (", in transparent huge pages (glibc.malloc.hugetlb=1)" if huge_pages else ""),
    )  # fmt: skip


PEERS: dict[str, Contender] = {
    "fio-uring": _fio("io_uring", huge_pages=False),
    "fio-libaio": _fio("libaio", huge_pages=False),
    "fio-uring-huge": _fio("io_uring", huge_pages=True),
    "fio-libaio-huge": _fio("libaio", huge_pages=True),
    "ds-pinned": Contender(
        label="DeepSpeed, its buffer", open=lambda point: DeepSpeedSession(point, pinned=True),
        varies=("num_threads", "overlap_events"), asynchronous=True, needs="deepspeed",
        page_cache=DIRECT, durable=ON_DEVICE,
        buffer="aio_handle.new_cpu_locked_tensor of the whole size",
    ),
    "ds": Contender(
        label="DeepSpeed, tensor", open=lambda point: DeepSpeedSession(point, pinned=False),
        varies=("num_threads", "overlap_events"), asynchronous=True, needs="deepspeed",
        page_cache=DIRECT, durable=ON_DEVICE,
        buffer="torch.empty; copied through page-locked memory that it allocates for every call",
    ),
    "python": Contender(
        label="Python, write/readinto", open=lambda _: PythonSession(), page_cache=BUFFERED, durable=FSYNCED,
        buffer="torch.empty as a memoryview; file opened with buffering=0",
    ),
    "torch": Contender(
        label="torch.save/load", open=lambda _: TorchSession(), page_cache=BUFFERED, durable=FSYNCED, pt_file=True,
        buffer="torch.empty; torch.load (weights_only=True, mmap=False) allocates its own in the timed part",
    ),
}  # fmt: skip


def contenders() -> dict[str, Contender]:
    """All of them, zoo's after fio's."""
    from benchmarks.io.zoo_contenders import ZOO

    fio = {name: c for name, c in PEERS.items() if c.engine}
    return {**fio, **ZOO, **{name: c for name, c in PEERS.items() if not c.engine}}
