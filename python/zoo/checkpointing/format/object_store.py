"""Checkpoints in an object store, by way of fsspec (https://filesystem-spec.readthedocs.io).

What a checkpoint needs of a store: an object appears whole, when all of it was sent, and then it stays. So nothing is
forced here; a file is closed in the place of that. There are no directories: one is there as long as something is in
it. An object that is put in the place of another replaces it at once, which is how a manifest gets to its place.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.format.disk import Sink, Source

_READERS = 4
_MANY = 8 << 20
"""Bytes that an upload sends at a time."""


def open_store(url: str) -> tuple[ObjectStore, Path]:
    """The store that a URL names ("s3://bucket/runs/a"), and the place in it.

    Raises:
        ValueError: there is no such kind of store, or what speaks to it is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        fs, place = url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{url!r} cannot be opened: {error}") from error
    return ObjectStore(fs, url.partition("://")[0]), Path("/" + place.strip("/"))


class ObjectStore:
    """A :class:`zoo.checkpointing.format.disk.Disk`. Paths are those of the store, bucket first, below "/".

    Args:
        fs: of fsspec.
        scheme: for error messages.
    """

    def __init__(self, fs: Any, scheme: str) -> None:
        self._fs, self._scheme = fs, scheme

    def __eq__(self, other: object) -> bool:
        """The same store, however often it was opened."""
        return isinstance(other, ObjectStore) and bool(self._fs == other._fs)

    def __hash__(self) -> int:
        return hash(self._fs)

    def __repr__(self) -> str:
        return f"ObjectStore({self._scheme!r})"

    def make_directory(self, path: Path) -> bool:
        """See :class:`Disk`. A bucket is for its owner to make."""
        return False

    def is_directory(self, path: Path) -> bool:
        """See :class:`Disk`: whether something is in it."""
        self._fs.invalidate_cache()
        with _errors(path):
            return bool(self._fs.isdir(_key(path)))

    def is_link(self, path: Path) -> bool:
        """See :class:`Disk`. Stores have none."""
        return False

    def names(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        self._fs.invalidate_cache()
        try:
            with _errors(path):
                found = self._fs.ls(_key(path), detail=False)
        except FileNotFoundError:
            return []
        names = {str(entry).rstrip("/").rpartition("/")[2] for entry in found}
        return sorted(names - {"", path.name} if _key(path) in {str(e).strip("/") for e in found} else names - {""})

    def create(self, path: Path, num_bytes: int) -> Sink:
        """See :class:`Disk`."""
        with _errors(path):
            return _Sink(self._fs.open(_key(path), "wb", block_size=_MANY), path)

    def open(self, path: Path) -> Source:
        """See :class:`Disk`."""
        self._fs.invalidate_cache()
        with _errors(path):
            info = self._fs.info(_key(path))
        if info["type"] != "file":
            raise OSError(errno.EINVAL, "not an object", str(path))
        return _Source(self._fs, path, int(info["size"]))

    def rename(self, path: Path, target: Path) -> None:
        """See :class:`Disk`. Of small objects: a copy, which replaces at once, and the old name goes."""
        with _errors(path):
            self._fs.pipe_file(_key(target), self._fs.cat_file(_key(path)))
            self._fs.rm_file(_key(path))

    def link(self, path: Path, target: Path) -> bool:
        """See :class:`Disk`. A copy that the store makes: nothing is sent."""
        try:
            with _errors(path):
                self._fs.cp_file(_key(path), _key(target))
        except NotImplementedError:
            return False
        return True

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        with _errors(path):
            if self._fs.isfile(_key(path)):
                self._fs.rm_file(_key(path))

    def sync_directory(self, path: Path) -> None:
        """See :class:`Disk`. There is nothing to force."""

    def modified_s(self, path: Path) -> float | None:
        """See :class:`Disk`."""
        self._fs.invalidate_cache()
        with contextlib.suppress(OSError, NotImplementedError), _errors(path):
            found: datetime = self._fs.modified(_key(path))
            return found.timestamp()
        return None


def _key(path: Path) -> str:
    return str(path).lstrip("/")


class _errors(contextlib.ContextDecorator):
    """What stores raise becomes an OSError, which is what a failure of a disk is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, (OSError, NotImplementedError)) or not isinstance(error, Exception):
            return
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self._path)) from error


class _Sink:
    """An object that is sent front to back, and there when it is closed."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path, self._at = file, path, 0

    def write(self, memory: torch.Tensor, offset: int) -> Callable[[], object]:
        if offset != self._at:
            raise OSError(errno.ESPIPE, f"byte {offset} after byte {self._at}", str(self._path))
        raw: Any = memory.numpy()
        with _errors(self._path):
            self._file.write(memoryview(raw).tobytes())
        self._at += memory.numel()
        return lambda: None

    def sync(self) -> None:
        file, self._file = self._file, None
        with _errors(self._path):
            file.close()

    def close(self) -> None:
        """Without :meth:`sync` nothing appears, as far as the store can give up an upload."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.discard() if hasattr(file, "discard") else file.close()


class _Source:
    """An object, read in ranges; several may be under way."""

    def __init__(self, fs: Any, path: Path, num_bytes: int) -> None:
        self._fs, self._path, self._size = fs, path, num_bytes
        self._readers: ThreadPoolExecutor | None = None

    def size(self) -> int:
        return self._size

    def read(self, memory: torch.Tensor, offset: int) -> int:
        end = min(offset + memory.numel(), self._size)
        if end <= offset:
            return 0
        with _errors(self._path):
            found = self._fs.cat_file(_key(self._path), start=offset, end=end)
        memory[: len(found)] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
        return len(found)

    def begin(self, memory: torch.Tensor, offset: int) -> Callable[[], int]:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="zoo-store")
        return partial(_result, self._readers.submit(self.read, memory, offset))

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown()


def _result(future: Any) -> int:
    found: int = future.result()
    return found
