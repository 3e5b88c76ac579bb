"""Tensors wait in a file, written and read by zoo.io while the model computes."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch

from zoo.activation_checkpointing.storages.extents import Extents
from zoo.activation_checkpointing.storages.protocol import Held
from zoo.io import AioConfig, BufferPool, Future, Handle

__all__ = ["Nvme"]


class Nvme:
    """Saved tensors wait in one file that has no name any more as soon as it is open: whatever ends the job, it goes.

    A tensor is copied into an aligned (with CUDA page-locked) buffer, which is written while the model computes on; in
    backward it is read one checkpoint ahead. At most ``staging_bytes`` of buffers wait for writes to end: then forward
    waits for the disk. Every read is compared with the CRC-32C of what was written.

    With ``aio.use_gds``, where cuFile is found, tensors of a GPU are written from its memory and read into it, without
    a buffer and without a CRC, which the CPU would have to make; ``staging_bytes`` are then of the GPU.

    Args:
        path: a directory on the device; it is made where it is missing.
        aio: how files are read and written.
        staging_bytes: of buffers.

    Raises:
        ValueError: no file can be made there.
    """

    fetches = True

    def __init__(
        self, path: str | os.PathLike[str], *, aio: AioConfig | None = None, staging_bytes: int = 1 << 28
    ) -> None:
        self.staging_bytes, self._path, self._aio = staging_bytes, os.fspath(path), aio
        self._handle = Handle.from_config(aio or AioConfig(), pool=BufferPool(1 << 46))
        name = Path(path, f".activations-{uuid.uuid4().hex}")
        try:
            name.parent.mkdir(parents=True, exist_ok=True)
            self._writes = self._handle.open(name, "w")
            try:
                self._reads = self._handle.open(name, "r")
            finally:
                name.unlink()
        except OSError as error:
            raise ValueError(
                f"activation_checkpointing.nvme_path={str(path)!r}: no file can be made there: {error}"
            ) from None
        self._extents = Extents()
        self._lock = threading.RLock()  # re-entrant: what is freed while it is held comes back here
        self._writing: deque[weakref.ref[_OnDisk]] = deque()
        self._leaving: list[tuple[Future, int, int]] = []
        self._staged = 0
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._handle, self._writes, self._reads)

    def __reduce__(self) -> Any:
        return _nvme, (self._path, self._aio, self.staging_bytes)  # a copy has a file of its own

    @property
    def file_bytes(self) -> int:
        """Of the file that are in use, in whole blocks."""
        self._sweep()
        with self._lock:
            return self._extents.end - self._extents.num_free

    @property
    def pool(self) -> BufferPool:
        """Where the buffers are from."""
        return self._handle.pool

    def put(self, flat: torch.Tensor, position: int, private: bool) -> Held:
        self._sweep()
        while self._staged and self._staged + flat.nbytes > self.staging_bytes and self._finish_oldest():
            pass
        direct = self.direct(flat.device)
        if direct:
            buffer = (flat if private else flat.clone()).view(torch.uint8)
        else:
            buffer = self._handle.empty(flat.nbytes, dtype=torch.uint8)
            buffer.view(flat.dtype).copy_(flat)  # from a GPU: when it is over, the bytes are there
        with self._lock:
            start, length = self._extents.take(flat.nbytes)
        held = _OnDisk(self, flat, start, length)
        try:
            held.write(buffer, self._handle.async_pwrite(buffer, self._writes, start, checksum=not direct))
        except OSError as error:
            raise OSError(f"a saved tensor of {flat.nbytes} bytes could not be written: {error}") from error
        with self._lock:
            self._staged += flat.nbytes
            self._writing.append(weakref.ref(held))
        return held

    def direct(self, device: torch.device) -> bool:
        """Whether tensors of a device are written and read without a buffer."""
        return self._handle.gds and device.type == "cuda"

    def read(self, buffer: torch.Tensor, start: int, checksum: int | None) -> Future:
        """Begin to fill a buffer from the file."""
        expected = False if checksum is None else checksum
        return self._handle.async_pread(buffer, self._reads, start, checksum=expected)

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """(num_bytes,) of the pool, or of a device that is reached without it."""
        if self.direct(device):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._handle.empty(num_bytes, dtype=torch.uint8)

    def reset(self) -> None:
        for future, *_ in list(self._leaving):
            with contextlib.suppress(OSError):  # of values that nobody needs any more
                future.wait()
        self._sweep()
        self.pool.trim()

    def close(self) -> None:
        """Finish what is under way and close the file; what waits in it is lost."""
        self._finalizer()

    def unstaged(self, num_bytes: int) -> None:
        """A buffer was given back."""
        with self._lock:
            self._staged -= num_bytes

    def free(self, start: int, length: int, future: Future | None) -> None:
        """A range is not needed any more: at once, or when the operation on it is over."""
        with self._lock:
            if future is None or future.done():
                self._extents.give(start, length)
            else:
                self._leaving.append((future, start, length))

    def _sweep(self) -> None:
        with self._lock:
            leaving, self._leaving = self._leaving, []
        for future, start, length in leaving:
            self.free(start, length, future)
        while self._writing:
            held = self._writing[0]()
            if held is not None and not held.written():
                break
            self._writing.popleft()

    def _finish_oldest(self) -> bool:
        if not self._writing:
            return False
        held = self._writing.popleft()()
        if held is not None:
            held.finish()
        return True


def _nvme(path: str, aio: AioConfig | None, staging_bytes: int) -> Nvme:
    return Nvme(path, aio=aio, staging_bytes=staging_bytes)


class _OnDisk:
    """Values in the file. States: being written, with their buffer; on the disk; being read, with a buffer."""

    def __init__(self, storage: Nvme, flat: torch.Tensor, start: int, length: int) -> None:
        self._storage, self._start, self._length = storage, start, length
        self._dtype, self._device, self.num_bytes = flat.dtype, flat.device, flat.nbytes
        self._buffer: torch.Tensor | None = None
        self._write: Future | None = None
        self._read: Future | None = None
        self._checksum: int | None = None
        self._failure: OSError | None = None

    def write(self, buffer: torch.Tensor, future: Future) -> None:
        """They are being written from this buffer."""
        self._buffer, self._write = buffer, future

    def written(self) -> bool:
        """Whether the write is over, and its buffer given back."""
        if self._write is not None and self._write.done():
            self.finish()
        return self._write is None

    def finish(self) -> None:
        """Wait for the write, and give its buffer back."""
        if self._write is not None:
            future, self._write, self._buffer = self._write, None, None
            self._storage.unstaged(self.num_bytes)
            try:
                self._checksum = future.wait().checksum
            except OSError as error:
                self._failure = error
                raise

    def fetch(self) -> None:
        if not self.written() or self._read is not None:
            return  # the buffer is still there, or a read is on its way
        if self._failure is not None:
            raise self._failure
        self._buffer = self._storage.buffer(self.num_bytes, self._device)
        self._read = self._storage.read(self._buffer, self._start, self._checksum)

    def get(self) -> torch.Tensor:
        self.fetch()
        if self._read is not None:
            future, self._read = self._read, None
            found, self._buffer = self._buffer, None
            future.wait()
        else:
            found = self._buffer
        if found is None:
            raise AssertionError("values that were fetched are not there")
        values = found.view(self._dtype)
        # The buffer of a write is still read by the disk, and the recomputed function may change its arguments.
        if values.device.type != self._device.type:
            return values.to(self._device)
        return values.clone() if self._write else values

    def __del__(self) -> None:
        if self._write is not None:
            self._storage.unstaged(self.num_bytes)
        self._storage.free(self._start, self._length, self._write or self._read)


def _close(process: int, handle: Handle, *files: Any) -> None:
    if process != os.getpid():
        return  # of a forked child, whose parent goes on
    for file in files:
        file.close()
    handle.close()
