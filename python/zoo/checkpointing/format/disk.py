"""What a checkpoint asks of a file system, and that of this machine.

Everything that saving and loading do to files goes through a :class:`Disk`, so that a test may put another one in its
place: one that loses what was not forced, fills up, or dies between any two calls. Nothing here decides an order.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from zoo.io import File, Future, Handle

_log = logging.getLogger("zoo.checkpointing")

LARGE_BYTES = 8 << 20
"""Files of at least this size go past the page cache, by :mod:`zoo.io`."""
LONG_BYTES = 2 << 20
"""So do reads of at least this many."""
QUEUE_DEPTH = 8


class Sink(Protocol):
    """A file that is being written, front to back or in any order."""

    def write(self, memory: torch.Tensor, offset: int) -> Callable[[], object]:
        """Begin to write these bytes, which must not change until what is returned has been called, or :meth:`sync`."""

    def sync(self) -> None:
        """Wait for all that was begun, and force the bytes to the device."""

    def close(self) -> None:
        """Close it; what was not forced may be lost."""


class Source(Protocol):
    """A file that is read."""

    def size(self) -> int:
        """Bytes."""

    def read(self, memory: torch.Tensor, offset: int) -> int:
        """Fill ``memory`` from ``offset``; returns how many bytes there were."""

    def begin(self, memory: torch.Tensor, offset: int) -> Callable[[], int]:
        """Begin to do so; what is returned waits for it, and is called once."""

    def close(self) -> None:
        """Close it."""


class Disk(Protocol):
    """A file system. Paths are absolute; errors are OSErrors."""

    def make_directory(self, path: Path) -> bool:
        """Make one directory whose parent is there; False where it is there already."""

    def is_directory(self, path: Path) -> bool:
        """Whether it is one."""

    def is_link(self, path: Path) -> bool:
        """Whether it is a symbolic link, to whatever."""

    def names(self, path: Path) -> list[str]:
        """What is in a directory."""

    def create(self, path: Path, num_bytes: int) -> Sink:
        """A new file, which will have so many bytes. Its name has random digits, so it is an error where one is there,
        or a symbolic link; a store, which cannot tell, replaces it."""

    def open(self, path: Path) -> Source:
        """An existing file; raises OSError for what is none: a symbolic link, a pipe."""

    def rename(self, path: Path, target: Path) -> None:
        """Put a file in the place of another in the same directory, at once."""

    def link(self, path: Path, target: Path) -> bool:
        """Give a file a second name; False where that cannot be."""

    def remove(self, path: Path) -> None:
        """Remove a file, or an empty directory."""

    def sync_directory(self, path: Path) -> None:
        """Force the entries of a directory to the device."""

    def modified_s(self, path: Path) -> float | None:
        """When a file was last written, in seconds since 1970 by the clock of the file system, which may be another
        than that of this machine; None where it is not there, or that is not known."""


class LocalDisk:
    """The file systems of this machine, network file systems included."""

    def make_directory(self, path: Path) -> bool:
        """See :class:`Disk`."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return False
        return True

    def is_directory(self, path: Path) -> bool:
        """See :class:`Disk`."""
        return path.is_dir()

    def is_link(self, path: Path) -> bool:
        """See :class:`Disk`."""
        return path.is_symlink()

    def names(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        return sorted(os.listdir(path))

    def create(self, path: Path, num_bytes: int) -> Sink:
        """See :class:`Disk`."""
        return _Sink(path, num_bytes)

    def open(self, path: Path) -> Source:
        """See :class:`Disk`."""
        return LocalSource(path)

    def rename(self, path: Path, target: Path) -> None:
        """See :class:`Disk`."""
        os.replace(path, target)

    def link(self, path: Path, target: Path) -> bool:
        """See :class:`Disk`."""
        try:
            os.link(path, target, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:  # another device, a file system without links, too many of them
            return False
        return True

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        if path.is_dir() and not path.is_symlink():
            os.rmdir(path)
        else:
            os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def modified_s(self, path: Path) -> float | None:
        """See :class:`Disk`."""
        try:
            return path.stat(follow_symlinks=False).st_mtime
        except OSError:
            return None


LOCAL = LocalDisk()


def check_named(directory: object) -> None:
    """Raise ValueError unless it is a path that is not empty, which would be the current folder."""
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise ValueError(f"{directory!r} names no folder; '.' is the current one.")


def place_of(directory: str | os.PathLike[str], disk: Disk | None = None) -> tuple[Disk, Path]:
    """The file system of a directory, and its absolute path there. A URL ("s3://bucket/runs") names an object store,
    but for "file://", which is this machine.

    Raises:
        ValueError: no name; a URL of a store that is not known, or whose package is not installed.
    """
    check_named(directory)
    text = os.fspath(directory)
    scheme, bar, rest = text.partition("://")
    if disk is None and bar and scheme not in ("", "file", "local"):
        from zoo.checkpointing.format.object_store import open_store

        return open_store(text)
    return disk if disk is not None else LOCAL, Path(os.path.abspath(rest if bar and disk is None else text))


def make_directories(disk: Disk, path: Path) -> None:
    """Make a directory and those above it that are missing; their entries survive a loss of power too."""
    if disk.is_directory(path):
        return
    make_directories(disk, path.parent)
    if disk.make_directory(path):
        disk.sync_directory(path.parent)


def put(disk: Disk, path: Path, content: bytes) -> None:
    """Replace a file by ``content``: readers see the old content or the new, whole, also after a loss of power. Several
    may do so at the same time."""
    temporary = beside(path)
    try:
        write_file(disk, temporary, content)
        disk.rename(temporary, path)
    except BaseException:
        discard(disk, temporary)
        raise
    disk.sync_directory(path.parent)


def beside(path: Path) -> Path:
    """Where a file is written that will be put at ``path``: a name that nobody else has, nor knows before."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def write_file(disk: Disk, path: Path, content: bytes) -> None:
    """Write a file, and force its bytes to the device; its name is not forced."""
    sink = disk.create(path, len(content))
    try:
        if content:
            sink.write(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0)
        sink.sync()
    finally:
        sink.close()


def read_file(disk: Disk, path: Path, at_most: int) -> bytes:
    """The whole content of a small file.

    Raises:
        ValueError: it has more than ``at_most`` bytes.
    """
    source = disk.open(path)
    try:
        size = source.size()
        if size > at_most:
            raise ValueError(f"{path.name} has {size:,} bytes; at most {at_most:,} are expected")
        memory = torch.empty(size, dtype=torch.uint8)
        found = source.read(memory, 0) if size else 0
        return memory[:found].numpy().tobytes()
    finally:
        source.close()


def read_beginning(disk: Disk, path: Path, at_most: int) -> bytes:
    """The first bytes of a file, or all that it has."""
    source = disk.open(path)
    try:
        memory = torch.empty(min(source.size(), at_most), dtype=torch.uint8)
        found = source.read(memory, 0) if memory.numel() else 0
        return memory[:found].numpy().tobytes()
    finally:
        source.close()


def discard(disk: Disk, path: Path) -> None:
    """Remove a file where there is one."""
    with contextlib.suppress(OSError):
        disk.remove(path)


def _nothing() -> None:
    """It is over already."""


class _Sink:
    """A large file by an engine of its own, a small one by plain calls."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._engine: Handle | None = None
        self._file: File | None = None
        self._under_way: list[Future] = []
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            if num_bytes >= LARGE_BYTES:
                from zoo.io import Handle

                self._engine = Handle(queue_depth=QUEUE_DEPTH)
                self._file = self._engine.open(path, "w")
        except BaseException:
            self.close()
            raise

    def write(self, memory: torch.Tensor, offset: int) -> Callable[[], object]:
        if self._engine is not None and self._file is not None:
            future = self._engine.async_pwrite(memory, self._file, offset)
            self._under_way.append(future)
            return future.wait
        raw: Any = memory.numpy()
        view = memoryview(raw)
        while view:
            done = os.pwrite(self._descriptor, view, offset)
            view, offset = view[done:], offset + done
        return _nothing

    def _wait(self) -> None:
        waiting, self._under_way = self._under_way, []
        for future in waiting:
            future.wait()

    def sync(self) -> None:
        self._wait()
        os.fsync(self._descriptor)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if self._engine is not None:
                with contextlib.suppress(OSError):  # of writes that nobody waited for: what was not forced may be lost
                    self._engine.close()
        finally:
            os.close(self._descriptor)


class Reading:
    """An engine of :mod:`zoo.io` that the files of one checkpoint share, made for the first long read."""

    def __init__(self) -> None:
        self._engine: Handle | None = None

    def open(self, descriptor: int) -> tuple[Handle, File]:
        """The engine, and a file of it. Raises OSError or RuntimeError where there is no room for one."""
        if self._engine is None:
            from zoo.io import Handle

            self._engine = Handle(queue_depth=QUEUE_DEPTH)
        return self._engine, self._engine.open(f"/proc/self/fd/{descriptor}", "r")

    def close(self) -> None:
        """End it; the next read makes another one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(OSError):  # of reads that nobody waited for
                engine.close()


class LocalSource:
    """A file by plain reads; long ones by an engine, its own or that of :meth:`share`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading, self._is_shared, self._is_plain = Reading(), False, False
        # Without waiting: a pipe that somebody has put there would never open.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        os.set_blocking(self._descriptor, True)
        self._file: tuple[Handle, File] | None = None

    def share(self, reading: Reading) -> None:
        """Read by an engine that others use too, and close."""
        self._reading, self._is_shared = reading, True

    def size(self) -> int:
        """See :class:`Source`."""
        return os.fstat(self._descriptor).st_size

    def read(self, memory: torch.Tensor, offset: int) -> int:
        """See :class:`Source`."""
        if memory.numel() >= LONG_BYTES:
            return self.begin(memory, offset)()
        return self._read(memory, offset)

    def _read(self, memory: torch.Tensor, offset: int) -> int:
        raw: Any = memory.numpy()
        view, total = memoryview(raw), 0
        while total < len(view):
            done = os.preadv(self._descriptor, [view[total:]], offset + total)
            if not done:
                break
            total += done
        return total

    def begin(self, memory: torch.Tensor, offset: int) -> Callable[[], int]:
        """See :class:`Source`."""
        if self._file is None and not self._is_plain:
            try:
                self._file = self._reading.open(self._descriptor)
            except (OSError, RuntimeError) as error:  # no descriptors left, or no memory that may be locked
                self._is_plain = True
                _log.warning("%s is read by plain calls, not past the page cache: %s", self._path.name, error)
        if self._file is None:
            return partial(self._read, memory, offset)
        engine, file = self._file
        future = engine.async_pread(memory, file, offset)

        def wait() -> int:
            future.wait()
            return memory.numel()

        return wait

    def close(self) -> None:
        """See :class:`Source`."""
        try:
            if self._file is not None:
                self._file[1].close()
            if not self._is_shared:
                self._reading.close()
        finally:
            os.close(self._descriptor)
