"""Files that others wrote, read by position; and tensors in them, of which nothing is read before it is asked for."""

from __future__ import annotations

import io
import itertools
import math
import os
import stat
import threading
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError

MAX_DIMS = 64
_CHUNK_BYTES = 1 << 20


class Handles:
    """File descriptors: a checkpoint may have more files than a process may have open, so few are at a time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._open: OrderedDict[int, list[int]] = OrderedDict()  # number of a file → [descriptor, users]
        self._numbers = itertools.count()
        self._dropped: deque[int] = deque()

    def number(self) -> int:
        """A new number for a file."""
        return next(self._numbers)

    @contextmanager
    def using(self, number: int, make: Callable[[], int]) -> Iterator[int]:
        """The descriptor of a file, opened by ``make`` if it is not; it stays open for so long."""
        with self._lock:
            self._close_dropped()
            entry = self._open.pop(number, None) or [make(), 0]
            self._open[number] = entry
            entry[1] += 1
            idle = [key for key, (_, users) in self._open.items() if not users]
            for key in idle[: max(len(self._open) - self._limit, 0)]:
                os.close(self._open.pop(key)[0])
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def close(self, number: int) -> None:
        """Nobody needs this file any more. Called by the garbage collector, which may run while the lock is held."""
        self._dropped.append(number)
        if self._lock.acquire(blocking=False):
            try:
                self._close_dropped()
            finally:
                self._lock.release()

    def _close_dropped(self) -> None:
        while self._dropped:
            entry = self._open.pop(self._dropped.popleft(), None)
            if entry is not None:
                os.close(entry[0])


_HANDLES = Handles(limit=64)


class OpenFile:
    """A regular file to be read by position, which must stay the one that it was when it was opened first."""

    def __init__(self, path: Path, follow_links: bool) -> None:
        self.path, self._follow_links = path, follow_links
        self._identity: tuple[int, int, int, int] | None = None
        self._number = _HANDLES.number()
        weakref.finalize(self, _HANDLES.close, self._number)
        with _HANDLES.using(self._number, self._make) as fd:
            self.size = os.fstat(fd).st_size

    def _make(self) -> int:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if self._follow_links else os.O_NOFOLLOW)
        try:
            fd = os.open(self.path, flags)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            link = not self._follow_links and os.path.islink(str(self.path).replace("\0", ""))
            why = "is a link, which a checkpoint's own files are not" if link else f"cannot be opened: {error}"
            raise CheckpointError(f"{str(self.path)!r} {why}") from None
        found = os.fstat(fd)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        regular = stat.S_ISREG(found.st_mode)
        if not regular or self._identity not in (None, identity):
            os.close(fd)
            why = "was changed while it was read" if regular else "is no regular file"
            raise CheckpointError(f"{str(self.path)!r} {why}")
        self._identity = identity
        return fd

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on.

        Raises:
            CheckpointError: there are not so many, or another file is in its place.
        """
        done = 0
        with _HANDLES.using(self._number, self._make) as fd:
            while done < len(out):
                try:
                    count = os.preadv(fd, [out[done:]], start + done)
                except OSError as error:
                    raise CheckpointError(f"{str(self.path)!r} cannot be read: {error}") from None
                if not count:
                    raise CheckpointError(f"{str(self.path)!r} became shorter while it was read")
                done += count


class Region:
    """Bytes [start, start + size) of an open file. Reading is by position, so threads may share it.

    Attributes:
        path: of the file; ``name`` says in errors which part of it this is.
        size: bytes of the region.
    """

    def __init__(self, file: OpenFile, start: int, size: int, name: str) -> None:
        self.path, self.name, self.start, self.size = file.path, name, start, size
        self._file = file

    @staticmethod
    def open(path: Path, *, follow_links: bool = False) -> Region:
        """The whole of a regular file.

        Raises:
            CheckpointError: no such file, a link (unless ``follow_links``), or a pipe, device or folder.
        """
        file = OpenFile(path, follow_links)
        return Region(file, 0, file.size, path.name)

    def part(self, start: int, size: int, name: str) -> Region:
        """A part of it, which keeps the file open.

        Raises:
            CheckpointError: it lies outside.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise CheckpointError(
                f"{name} is said to be the bytes [{start}, {start + size}) of {self.name}, which has {self.size}"
            )
        return Region(self._file, self.start + start, size, name)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on.

        Raises:
            CheckpointError: there are not so many.
        """
        if start < 0 or start + len(out) > self.size:
            raise CheckpointError(
                f"{self.name} has {self.size} bytes; [{start}, {start + len(out)}) lies outside of it"
            )
        self._file.read_into(self.start + start, out)

    def bytes(self, start: int = 0, size: int | None = None) -> bytes:
        """Bytes [start, start + size); all by default."""
        size = self.size - start if size is None else size
        if size < 0 or start < 0 or start + size > self.size:
            raise CheckpointError(f"{self.name} has {self.size} bytes; [{start}, {start + size}) lies outside of it")
        out = bytearray(size)
        self.read_into(start, memoryview(out))
        return bytes(out)

    def crc32(self) -> int:
        """Of all bytes, a MiB at a time."""
        found, buffer = 0, memoryview(bytearray(min(_CHUNK_BYTES, self.size)))
        for start in range(0, self.size, _CHUNK_BYTES):
            part = buffer[: min(_CHUNK_BYTES, self.size - start)]
            self.read_into(start, part)
            found = zlib.crc32(part, found)
        return found


class RegionFile(io.RawIOBase):
    """A region as a binary file to be read, for libraries that want one."""

    def __init__(self, region: Region) -> None:
        self._region, self._at = region, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._region.size}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, out: Any) -> int:
        view = memoryview(out).cast("B")
        count = max(0, min(len(view), self._region.size - self._at))
        self._region.read_into(self._at if count else 0, view[:count])
        self._at += count
        return count


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file: element ``offset`` of the storage ``data``, on with ``stride``; nothing of it is read yet.

    Made only by :meth:`checked`, so every element lies in the storage, and no tensor has more elements than its
    storage: a file cannot ask for more memory than it has bytes.

    ``conjugate``, ``negative``: it is the conjugate, or the negative, of what is stored, as torch keeps views of such.
    """

    data: Region
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def checked(
        cls, data: Region, dtype: torch.dtype, offset: Any, shape: Any, stride: Any, *, what: str = "a tensor",
        conjugate: bool = False, negative: bool = False,
    ) -> StoredTensor:  # fmt: skip
        """The tensor, from what a file says of it.

        Raises:
            CheckpointError: sizes that are no sizes, or elements outside of the storage.
        """
        for sizes in (shape, stride, (offset,)):
            if not isinstance(sizes, (tuple, list)) or len(sizes) > MAX_DIMS or not all(map(is_size, sizes)):
                raise CheckpointError(f"{what} in {data.path.name} has {_short(sizes)} where sizes must be")
        if len(shape) != len(stride):
            raise CheckpointError(f"{what} in {data.path.name} has {len(shape)} dims and {len(stride)} strides")
        held, numel = data.size // dtype.itemsize, math.prod(shape)
        last = offset + sum((d - 1) * s for d, s in zip(shape, stride, strict=True)) if numel else -1
        if last >= held or numel > held:
            raise CheckpointError(
                f"{what} of shape {tuple(shape)} with strides {tuple(stride)} from element {offset} does not fit its "
                f"storage of {held} elements in {data.path.name}"
            )
        return cls(data, dtype, offset, tuple(shape), tuple(stride), conjugate, negative)

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it lies, and as what: tensors of one place are one tensor under two names."""
        signs = self.conjugate, self.negative
        return self.data.path, self.data.start, self.offset, self.shape, self.stride, self.dtype, signs

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel < 2
            expected *= size
        return True

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of its row-major order, flat; all by default."""
        length = self.numel - start if length is None else length
        if start < 0 or length < 0 or start + length > self.numel:
            raise CheckpointError(f"[{start}, {start + length}) lies outside of a tensor of {self.numel} elements")
        if self.contiguous:
            return self._run(self.offset + start, length)
        if not length:
            return torch.empty(0, dtype=self.dtype)
        span = 1 + sum((d - 1) * s for d, s in zip(self.shape, self.stride, strict=True))
        whole = self._run(self.offset, span).as_strided(self.shape, self.stride)
        return whole.reshape(-1)[start : start + length]

    def tensor(self) -> torch.Tensor:
        """All of it, in its shape."""
        return self.read().view(self.shape)

    def _run(self, first: int, count: int) -> torch.Tensor:
        out = torch.empty(count, dtype=self.dtype)
        if count:
            raw: Any = out.view(torch.uint8).numpy()
            self.data.read_into(first * self.dtype.itemsize, memoryview(raw))
        if self.conjugate:
            out = out.conj_physical()
        return -out if self.negative else out


def is_size(value: Any) -> bool:
    """Whether it can be the size of a dim or an offset."""
    return type(value) is int and 0 <= value < 2**63


def _short(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else type(value).__name__
