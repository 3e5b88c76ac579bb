"""Keys and values of past tokens in files on NVMe, for contexts that memory does not hold.

A layer has one file, token after token: (time, rows·heads·(dim of keys + dim of values)). A token is written where it
belongs, and what a layer sees is read with one read, the next layer's while this one computes, across the end of a
token too. Memory is two layers' worth, whatever the number of layers.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zoo.inference.cache import _Full
from zoo.io import Future, Handle

Tensor = torch.Tensor
BUFFERS = 2
"""Of a layer's size: one is computed with, the next one is read."""


class CacheFiles:
    """A folder for the files of one cache, and the buffers that its layers share.

    Args:
        folder: where a new folder is made, which goes with the cache.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="zoo-cache-", dir=folder))
        self.handle = Handle(block_size=1 << 20, queue_depth=8, num_threads=1)
        self.layers: list[FileLayer] = []
        self._buffers: list[_Buffer] = []
        weakref.finalize(self, _end, self.handle, self.home)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheFiles:
        """With files of its own, in a new folder beside this one.

        Raises:
            OSError: the disk has no room for them.
        """
        for buffer in self._buffers:
            buffer.settle()
        made = memo[id(self)] = CacheFiles(self.home.parent)
        for path in self.home.iterdir():
            shutil.copyfile(path, made.home / path.name)
        made.layers = copy.deepcopy(self.layers, memo)
        return made

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return sum(one.memory.nbytes for one in self._buffers)

    def free(self, num_bytes: int) -> _Buffer:
        """The buffer that was used longest ago, of at least this size, when what was begun with it is done."""
        if len(self._buffers) < BUFFERS:
            self._buffers.append(_Buffer(self.handle.empty((num_bytes,), dtype=torch.uint8)))
        else:
            self._buffers[0].settle()
            self._buffers.append(self._buffers.pop(0))
        last = self._buffers[-1]
        last.layer = None
        if last.memory.nbytes < num_bytes:
            last.memory = self.handle.empty((num_bytes,), dtype=torch.uint8)
        return last

    def used(self, buffer: _Buffer) -> None:
        """Of all buffers this one was used last."""
        self._buffers.remove(buffer)
        self._buffers.append(buffer)

    def holding(self, layer: FileLayer) -> _Buffer | None:
        """The buffer into which the tokens of a layer were read ahead."""
        return next((one for one in self._buffers if one.layer is layer), None)

    def forget(self, layer: FileLayer) -> None:
        """What was read ahead of a layer is not what is in its file."""
        for buffer in self._buffers:
            if buffer.layer is layer:
                buffer.settle()
                buffer.layer = None

    def after(self, layer: FileLayer) -> FileLayer:
        """The layer that comes next; after the last one the first."""
        return self.layers[(self.layers.index(layer) + 1) % len(self.layers)]


class _Buffer:
    """Memory of one layer. layer: whose tokens it has, or will have when ``pending`` is done, which ``writes`` them or
    reads them. tokens: how many."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.tokens = memory, 0
        self.layer: FileLayer | None = None
        self.pending: Future | None = None
        self.writes = False

    def settle(self) -> None:
        """Wait for what was begun with it.

        Raises:
            zoo.io.TransferError: it failed. A layer whose tokens were not written is lost.
        """
        if self.pending is None:
            return
        try:
            self.pending.wait()
        except Exception:
            self.pending, layer, self.layer = None, self.layer, None
            if self.writes and layer is not None:
                layer.lost = True
            raise
        self.pending = None


class FileLayer(_Full):  # type: ignore[no-untyped-call]
    """A layer of full attention whose tokens lie in a file.

    Args:
        room: tokens of a row.
        files: of the cache.
    """

    lost = False
    """What was to be written was not: :meth:`reset` comes first."""

    def __init__(self, room: int, files: CacheFiles) -> None:
        super().__init__(room)
        self.files, self.name = files, f"{len(files.layers)}.bin"
        files.layers.append(self)

    @property
    def path(self) -> Path:
        """Of its file."""
        return self.files.home / self.name

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the space on the disk, all of it.

        Raises:
            OSError: the disk has not so much.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        self.kept_dtype = self.kept_as[0] or self.dtype
        self._lay(*((one.shape[0], one.shape[1], one.shape[3]) for one in (key_states, value_states)))
        self.is_initialized = True

    def _lay(self, keys: tuple[int, int, int], values: tuple[int, int, int]) -> None:
        self.shapes = keys, values
        self.numbers = [rows * heads * dim for rows, heads, dim in self.shapes]
        self.token_bytes = sum(self.numbers) * self.kept_dtype.itemsize
        with open(self.path, "ab") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, self.room * self.token_bytes)
            except OSError as error:
                self.path.unlink()
                raise OSError(
                    error.errno, f"a layer of the cache takes {self.room * self.token_bytes} bytes for {self.room} "
                    f"tokens of {keys[0]} rows; there is no room for them: {error.strerror}", str(self.path),
                ) from error  # fmt: skip

    @property
    def rows(self) -> int:
        """Of the cache."""
        return self.shapes[0][0]

    @property
    def file_bytes(self) -> int:
        """On the disk."""
        return self.room * self.token_bytes if self.is_initialized else 0

    @property
    def keys(self) -> Any:  # type: ignore[override]
        """Of all tokens that came, read from the file. None before any came."""
        return self._all(0) if self.is_initialized else None

    @property
    def values(self) -> Any:  # type: ignore[override]
        """As :attr:`keys`."""
        return self._all(1) if self.is_initialized else None

    def _all(self, which: int) -> Tensor:
        return self._read()[which].to(self.device, self.dtype)

    def _read(self) -> tuple[Tensor, Tensor]:
        self._written()
        memory = torch.empty(self.length * self.token_bytes, dtype=torch.uint8)
        if self.length:
            self.files.handle.pread(memory, self.path)
        return self._views(memory, self.length)

    def _written(self) -> None:
        for buffer in self.files._buffers:
            if buffer.layer is self:
                buffer.settle()

    def _views(self, memory: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """(rows, heads, tokens, dim) of keys and of values, in memory that is laid as the file is."""
        flat = memory[: tokens * self.token_bytes].view(self.kept_dtype).view(tokens, sum(self.numbers))
        keys, values = torch.split(flat, self.numbers, 1)
        return (
            keys.view(tokens, *self.shapes[0]).permute(1, 2, 0, 3),
            values.view(tokens, *self.shapes[1]).permute(1, 2, 0, 3),
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Write what comes; all that is there, valid until the layer after the next one is asked."""
        if self.lost:
            raise ValueError("tokens of this cache were not written to its file (the disk failed): reset() it first.")
        begin, length = self.length, self._admit(key_states, value_states)
        buffer = self._brought(begin)
        keys, values = self._views(buffer.memory, length)
        keys[:, :, begin:], values[:, :, begin:] = key_states, value_states
        new = buffer.memory[begin * self.token_bytes : length * self.token_bytes]
        buffer.pending = self.files.handle.async_pwrite(new, self.path, begin * self.token_bytes)
        buffer.layer, buffer.writes, buffer.tokens, self.length = self, True, length, length
        self.files.after(self).read_ahead()
        return self._seen(keys), self._seen(values)

    def _brought(self, tokens: int) -> _Buffer:
        """A buffer with the tokens that are in the file, and room for all."""
        files, size = self.files, self.room * self.token_bytes
        buffer = files.holding(self)
        if buffer is not None and buffer.tokens >= tokens:
            buffer.settle()
            files.used(buffer)
            return buffer
        files.forget(self)
        buffer = files.free(size)
        if tokens:
            files.handle.pread(buffer.memory[: tokens * self.token_bytes], self.path)
        return buffer

    def read_ahead(self) -> None:
        """Begin reading what is there, unless it is in a buffer or there is nothing."""
        if not self.is_initialized or not self.length or self.files.holding(self) is not None:
            return
        buffer = self.files.free(self.room * self.token_bytes)
        buffer.pending = self.files.handle.async_pread(buffer.memory[: self.length * self.token_bytes], self.path)
        buffer.layer, buffer.writes, buffer.tokens = self, False, self.length  # now: a file that is gone is not begun

    def place(self, rows: int, tokens: int, heads: int, dim: int, like: Tensor) -> None:
        """None: tokens come by :meth:`update`."""

    def reset(self) -> None:
        """Nothing is in it; the file stays."""
        self.length, self.lost = 0, False
        self.files.forget(self)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row several times."""
        self._change_rows(lambda one: one.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows."""
        self._change_rows(lambda one: one[indices.to(one.device)])

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Read the file, and write it anew."""
        if not self.is_initialized:
            return
        keys, values = (change(one) for one in self._read())
        self.files.forget(self)
        rows = keys.shape[0]
        if rows != self.rows:
            self._lay(*((rows, heads, dim) for _, heads, dim in self.shapes))
        if self.length:
            memory = torch.empty(self.length * self.token_bytes, dtype=torch.uint8)
            for one, other in zip(self._views(memory, self.length), (keys, values), strict=True):
                one.copy_(other)
            self.files.handle.pwrite(memory, self.path)


def _end(handle: Handle, folder: Path) -> None:
    handle.close()
    shutil.rmtree(folder, ignore_errors=True)
