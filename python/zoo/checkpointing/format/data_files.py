"""Files of tensors: safetensors whose blocks have checksums, written and read by way of aligned memory.

The format (https://github.com/huggingface/safetensors, README, "Format"): the length of the header in 8 bytes,
little endian; the header in JSON; the bytes of all tensors without gaps. Here the header is padded to 4096 bytes. Each
block of 1 MiB of a file has a CRC-32C (RFC 3720, appendix B.4), computed while it is written and compared when any of
it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zoo.checkpointing.errors import DamageError, UnreadableError, no_access
from zoo.checkpointing.format.disk import Disk, LocalSource, Reading, Sink, Source
from zoo.checkpointing.format.index import BLOCK_BYTES, Column
from zoo.checkpointing.format.tensors import Entry, flat_of, header_of
from zoo.layout import Lent

STAGE_BYTES = 8 << 20
"""What is collected before it is written."""
NUM_STAGES = 3
"""One of these is filled, and the others are on their way."""
HEADER_MULTIPLE = 4096
HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Written:
    """A file that was written: its size, the first byte of each tensor by key, and the CRC-32C of each block."""

    size: int
    offsets: dict[str, int]
    sums: Column


def write_data(disk: Disk, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Written:
    """Write a file and force its bytes to the device; its name is for the caller to force.

    Raises:
        CheckpointError: a dtype that the format has no code for, or a tensor that is not what its entry says.
        OSError: the disk is full, or refuses.
    """
    ordered, head, size = _laid_out(entries, metadata)
    sink = disk.create(path, size)
    try:
        writer = _Writer(sink, min(STAGE_BYTES, -(-size // 4096) * 4096), min(NUM_STAGES, 1 + size // STAGE_BYTES))
        _send_all(writer, head, ordered, release=True)
        sums = writer.finish()
        sink.sync()
    finally:
        sink.close()
    offsets, at = {}, len(head)
    for entry in ordered:
        offsets[entry.key], at = at, at + entry.length * entry.dtype.itemsize
    return Written(size, offsets, sums)


def sums_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> Column:
    """The checksums that :func:`write_data` would find; nothing is written."""
    ordered, head, size = _laid_out(entries, metadata)
    writer = _Writer(_Nowhere(), min(STAGE_BYTES, -(-size // 4096) * 4096), 1)
    _send_all(writer, head, ordered, release=False)
    return writer.finish()


def _laid_out(entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[list[Entry], bytes, int]:
    """The tensors in the order of the file, its first bytes, and how many it has."""
    # Wide elements first: then every tensor begins at a multiple of its element's size. Otherwise in the order in which
    # they were given, in which whoever loads them will ask for them.
    ordered = sorted(entries, key=lambda e: -e.dtype.itemsize)
    header, _ = header_of([(e.key, e.dtype, (e.length,)) for e in ordered], metadata, HEADER_MULTIPLE)
    head = len(header).to_bytes(8, "little") + header
    return ordered, head, len(head) + sum(e.length * e.dtype.itemsize for e in ordered)


def _send_all(writer: _Writer, head: bytes, ordered: Iterable[Entry], *, release: bool) -> None:
    writer.add(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for entry in ordered:
        if entry.lent is not None:
            writer.read(entry.lent, entry.length * entry.dtype.itemsize)
            if release:
                entry.lent.release()
        elif entry.length:
            writer.add(flat_of(entry).view(torch.uint8))


class _Nowhere:
    """A sink that keeps nothing."""

    def write(self, memory: torch.Tensor, offset: int) -> Callable[[], object]:
        return lambda: None

    def sync(self) -> None: ...

    def close(self) -> None: ...


class _Writer:
    """Bytes in order, collected in one of several aligned stages while the others are written."""

    def __init__(self, sink: Sink, stage_bytes: int, num_stages: int) -> None:
        self._sink = sink
        self._stages = [_aligned(stage_bytes) for _ in range(num_stages)]
        self._written: deque[Callable[[], object]] = deque()
        self._filled = self._at = 0
        self._sums: list[int] = []

    def add(self, flat: torch.Tensor) -> None:
        """The next bytes; a tensor of any device."""
        place, num_bytes = 0, flat.numel()
        while place < num_bytes:
            stage = self._stages[0]
            part = min(num_bytes - place, stage.numel() - self._filled)
            if flat.is_cpu:  # without torch's threads, which compute, and without the lock of Python
                ctypes.memmove(stage.data_ptr() + self._filled, flat.data_ptr() + place, part)
            else:
                stage[self._filled : self._filled + part].copy_(flat[place : place + part])
            place, self._filled = place + part, self._filled + part
            if self._filled == stage.numel():
                self._send()

    def read(self, lent: Lent, num_bytes: int) -> None:
        """The next bytes, from where they lie."""
        place = 0
        while place < num_bytes:
            stage = self._stages[0]
            part = min(num_bytes - place, stage.numel() - self._filled)
            lent.read(stage[self._filled : self._filled + part], place)
            place, self._filled = place + part, self._filled + part
            if self._filled == stage.numel():
                self._send()

    def _send(self) -> None:
        from zoo.io import crc32c

        full = self._stages[0][: self._filled]
        self._sums += [crc32c(block) for block in torch.split(full, BLOCK_BYTES)]
        self._written.append(self._sink.write(full, self._at))
        self._at, self._filled = self._at + self._filled, 0
        self._stages.append(self._stages.pop(0))
        if len(self._written) == len(self._stages):
            self._written.popleft()()  # the next stage is free

    def finish(self) -> Column:
        """The rest; the CRC-32C of every block."""
        if self._filled:
            self._send()
        return np.array(self._sums, dtype="<u4")


def _aligned(num_bytes: int) -> torch.Tensor:
    """Memory of so many bytes, whole blocks where it is more than one, that begins at a multiple of 4096.

    From 2 MiB on it lies on huge pages where the system has them: a device reaches small pages in many small pieces, at
    0.7 to 0.8 of its bandwidth and for five times the CPU time.
    """
    if num_bytes > BLOCK_BYTES:
        num_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    if num_bytes < HUGE_PAGE:
        raw = torch.empty(num_bytes + 4096, dtype=torch.uint8)
        first = -raw.data_ptr() % 4096
    else:
        mapped = mmap.mmap(-1, num_bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # no Linux, or a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(mapped, dtype=torch.uint8)
        first = -raw.data_ptr() % HUGE_PAGE
    return raw[first : first + num_bytes]


CHUNK_BYTES = 4 * BLOCK_BYTES
"""What is read of a large file at once, and ahead of who reads it from front to back."""
AHEAD = 3
"""Chunks that are under way then."""
CACHE_BYTES = 64 << 20


@dataclass
class _Chunk:
    """Blocks of a file, in a part of ``room``; ``wait`` until they are here and were compared."""

    room: torch.Tensor
    memory: torch.Tensor
    wait: Callable[[], int] | None


class Cache:
    """What was read of the files of one checkpoint last, at most :data:`CACHE_BYTES`; memory is used again.

    ``reading``: the engine that its files on this machine share.
    """

    def __init__(self) -> None:
        self.reading = Reading()
        self._chunks: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()
        self._free: list[torch.Tensor] = []

    def get(self, file: int, number: int) -> _Chunk | None:
        """A chunk that is here, or comes."""
        found = self._chunks.get((file, number))
        if found is not None:
            self._chunks.move_to_end((file, number))
        return found

    def put(self, file: int, number: int, chunk: _Chunk) -> None:
        """Keep a chunk, in the place of the one that was not asked for for the longest time; one that is still to be
        used goes only where all are, and never one of the latest."""
        self._chunks[file, number] = chunk
        while len(self._chunks) > CACHE_BYTES // CHUNK_BYTES:
            oldest = next((key for key, old in self._chunks.items() if old.wait is None), next(iter(self._chunks)))
            self._give_back(self._chunks.pop(oldest))

    def memory(self) -> torch.Tensor:
        """For a chunk."""
        return self._free.pop() if self._free else _aligned(CHUNK_BYTES)

    def drop(self, file: int, number: int | None = None) -> None:
        """Forget a chunk, or all of a file; nothing is under way any more."""
        for key in [key for key in self._chunks if key[0] == file and number in (None, key[1])]:
            self._give_back(self._chunks.pop(key))

    def _give_back(self, chunk: _Chunk) -> None:
        if chunk.wait is not None:
            with contextlib.suppress(OSError):
                chunk.wait()
        if len(self._free) < 4:
            self._free.append(chunk.room)


_keys = itertools.count()


class DataFile:
    """A file that is read in any order; what is read is compared with the sums of its blocks.

    A small file is read block by block. A large one is read in chunks, which several readers that go through it from
    front to back, such as one for each role, find here already: where the chunk before it was asked for, the next ones
    are under way.

    Args:
        size: in bytes, as the index says. sums: CRC-32C of each block; None: nothing is compared.
        cache: of the checkpoint.

    Raises:
        DamageError: it is not there, or has another size.
        UnreadableError: it may not be opened, or too many files are open.
    """

    def __init__(self, disk: Disk, path: Path, size: int, sums: Column | None, cache: Cache | None = None) -> None:
        self.name, self.size, self._sums = path.name, size, sums
        self._cache = cache if cache is not None else Cache()
        self._key = next(_keys)
        try:
            self._source: Source = disk.open(path)
        except OSError as error:
            if no_access(error):
                raise UnreadableError(
                    f"the file {path.name} in {str(path.parent)!r} cannot be opened: {error.strerror or error}"
                ) from None
            reason = "is missing from" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error}) in"
            raise DamageError(f"the file {path.name} {reason} {str(path.parent)!r}") from None
        if cache is not None and isinstance(self._source, LocalSource):
            self._source.share(cache.reading)
        found = self._source.size()
        if found != size:
            self._source.close()
            raise DamageError(f"the file {path.name} has {found} bytes; the index says {size}")

    def close(self) -> None:
        """Close it."""
        self._cache.drop(self._key)
        self._source.close()

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Fill ``out``, flat, with the bytes at ``offset``.

        Raises:
            DamageError: a block that is not what was written.
        """
        memory = out.view(torch.uint8)
        stop, at = offset + memory.numel(), offset
        last = (stop - 1) // CHUNK_BYTES
        while at < stop:
            number = at // CHUNK_BYTES
            begin = number * CHUNK_BYTES
            end = min(stop, begin + CHUNK_BYTES)
            chunk = self._chunk(number, last)
            ctypes.memmove(memory.data_ptr() + at - offset, chunk.data_ptr() + at - begin, end - at)
            at = end

    def _chunk(self, number: int, last: int) -> torch.Tensor:
        """A chunk, which is what was written; it is valid until the next call. ``last``: will be asked for too."""
        found = self._cache.get(self._key, number)
        if found is not None and found.wait is None:
            return found.memory
        if found is not None or self._cache.get(self._key, number - 1) is not None:
            last = self._num_chunks - 1  # who goes from one to the next goes on
        if found is None:
            found = self._begin(number)
        for after in range(number + 1, min(number + AHEAD, last) + 1):
            if self._cache.get(self._key, after) is None:
                self._begin(after)
        if found.wait is None:
            raise AssertionError("a chunk that is under way was given back.")
        try:
            self._check(found.memory, number, found.wait)
        except BaseException:
            found.wait = None
            self._cache.drop(self._key, number)
            raise
        found.wait = None
        return found.memory

    @property
    def _num_chunks(self) -> int:
        return -(-self.size // CHUNK_BYTES)

    def _begin(self, number: int) -> _Chunk:
        begin = number * CHUNK_BYTES
        room = self._cache.memory()
        memory = room[: min(CHUNK_BYTES, self.size - begin)]
        large = memory.numel() == CHUNK_BYTES
        wait = self._source.begin(memory, begin) if large else partial(self._source.read, memory, begin)
        chunk = _Chunk(room, memory, wait)
        self._cache.put(self._key, number, chunk)
        return chunk

    def _check(self, memory: torch.Tensor, number: int, wait: Callable[[], int]) -> None:
        """Wait for a chunk, and compare it."""
        first = number * CHUNK_BYTES
        try:
            found = wait()
        except OSError as error:
            raise DamageError(f"the file {self.name} cannot be read: {error}") from None
        if found < memory.numel():
            raise DamageError(f"the file {self.name} ends at byte {first + found} of {self.size}")
        if self._sums is None:
            return
        from zoo.io import crc32c

        for block, part in enumerate(torch.split(memory, BLOCK_BYTES), first // BLOCK_BYTES):
            if crc32c(part) != int(self._sums[block]):
                begin = block * BLOCK_BYTES
                raise DamageError(
                    f"the bytes {begin} to {begin + part.numel() - 1} of the file {self.name} have another CRC-32C "
                    "than the index says: they were changed or damaged after they were written"
                )

    def check(self) -> None:
        """Read all of it; raises DamageError as :meth:`read` does."""
        for number in range(self._num_chunks):
            self._chunk(number, self._num_chunks)
