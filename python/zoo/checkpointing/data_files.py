"""Files of tensors: safetensors whose blocks have checksums, written and read by way of aligned memory.

The format (https://github.com/huggingface/safetensors, README, "Format"): the length of the header in 8 bytes,
little endian; the header in JSON; the bytes of all tensors without gaps. Here the header is padded to 4096 bytes. Each
block of 1 MiB of a file has a CRC-32C (RFC 3720, appendix B.4), computed while it is written and compared when any of
it is read.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zoo.checkpointing.disk import Disk, Sink, Source
from zoo.checkpointing.errors import DamageError
from zoo.checkpointing.index import BLOCK_BYTES, Column
from zoo.checkpointing.tensors import Entry, flat_of, header_of

STAGE_BYTES = 8 << 20
"""What is collected before it is written; two of these are in use."""
HEADER_MULTIPLE = 4096
_KEPT_BLOCKS = 4


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
    # Wide elements first: then every tensor begins at a multiple of its element's size.
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.key))
    header, relative = header_of([(e.key, e.dtype, (e.length,)) for e in ordered], metadata, HEADER_MULTIPLE)
    head = len(header).to_bytes(8, "little") + header
    size = len(head) + sum(e.length * e.dtype.itemsize for e in ordered)
    sink = disk.create(path, size)
    try:
        writer = _Writer(sink, min(STAGE_BYTES, -(-size // 4096) * 4096))
        writer.add(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for entry in ordered:
            if entry.length:
                writer.add(flat_of(entry).view(torch.uint8))
        sums = writer.finish()
        sink.sync()
    finally:
        sink.close()
    offsets = {key: len(head) + offset for key, offset in relative.items()}
    return Written(size, offsets, sums)


class _Writer:
    """Bytes in order, collected in one of two aligned stages while the other one is written."""

    def __init__(self, sink: Sink, stage_bytes: int) -> None:
        self._sink = sink
        self._stages = [_aligned(stage_bytes), _aligned(stage_bytes)]
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

    def _send(self) -> None:
        from zoo.io import crc32c

        full = self._stages[0][: self._filled]
        self._sums += [crc32c(block) for block in torch.split(full, BLOCK_BYTES)]
        self._sink.wait()  # the other stage is free
        self._sink.write(full, self._at)
        self._at, self._filled = self._at + self._filled, 0
        self._stages.reverse()

    def finish(self) -> Column:
        """The rest; the CRC-32C of every block."""
        if self._filled:
            self._send()
        return np.array(self._sums, dtype="<u4")


def _aligned(num_bytes: int) -> torch.Tensor:
    """Memory of so many bytes, whole blocks where it is more than one, that begins at a multiple of 4096."""
    if num_bytes > BLOCK_BYTES:
        num_bytes = -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
    raw = torch.empty(num_bytes + 4096, dtype=torch.uint8)
    first = -raw.data_ptr() % 4096
    return raw[first : first + num_bytes]


class DataFile:
    """A file that is read in any order; what is read is compared with the sums of its blocks.

    Args:
        size: in bytes, as the index says. sums: CRC-32C of each block; None: nothing is compared.

    Raises:
        DamageError: it is not there, or has another size.
    """

    def __init__(self, disk: Disk, path: Path, size: int, sums: Column | None) -> None:
        self.name, self.size, self._sums = path.name, size, sums
        try:
            self._source: Source = disk.open(path)
        except OSError as error:
            reason = "is missing from" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error}) in"
            raise DamageError(f"the file {path.name} {reason} {str(path.parent)!r}") from None
        found = self._source.size()
        if found != size:
            self._source.close()
            raise DamageError(f"the file {path.name} has {found} bytes; the index says {size}")
        self._blocks: OrderedDict[int, torch.Tensor] = OrderedDict()

    def close(self) -> None:
        """Close it."""
        self._blocks.clear()
        self._source.close()

    def read(self, out: torch.Tensor, offset: int) -> None:
        """Fill ``out``, flat, with the bytes at ``offset``.

        Whole blocks go straight into it; of others that are cut the whole block is read, and kept for its neighbours.

        Raises:
            DamageError: a block that is not what was written.
        """
        memory = out.view(torch.uint8)
        stop = offset + memory.numel()
        first, last = -(-offset // BLOCK_BYTES), stop // BLOCK_BYTES  # whole blocks
        if stop == self.size:
            last = -(-stop // BLOCK_BYTES)
        if first >= last:
            first = last = min(first, -(-stop // BLOCK_BYTES))
        at = offset
        for block in range(offset // BLOCK_BYTES, first):
            at = self._copy(memory, block, at, stop, offset)
        if first < last:
            end = min(last * BLOCK_BYTES, self.size)
            self._straight(memory[at - offset : end - offset], first)
            at = end
        while at < stop:
            at = self._copy(memory, at // BLOCK_BYTES, at, stop, offset)

    def _copy(self, memory: torch.Tensor, block: int, at: int, stop: int, offset: int) -> int:
        begin = block * BLOCK_BYTES
        end = min(stop, begin + BLOCK_BYTES)
        memory[at - offset : end - offset] = self._block(block)[at - begin : end - begin]
        return end

    def _block(self, block: int) -> torch.Tensor:
        found = self._blocks.get(block)
        if found is None:
            begin = block * BLOCK_BYTES
            found = torch.empty(min(BLOCK_BYTES, self.size - begin), dtype=torch.uint8)
            self._straight(found, block)
            self._blocks[block] = found
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block)
        return found

    def _straight(self, memory: torch.Tensor, block: int) -> None:
        """Blocks from ``block`` on, which fill ``memory``."""
        try:
            found = self._source.read(memory, block * BLOCK_BYTES)
        except OSError as error:
            raise DamageError(f"the file {self.name} cannot be read: {error}") from None
        if found < memory.numel():
            raise DamageError(f"the file {self.name} ends at byte {block * BLOCK_BYTES + found} of {self.size}")
        if self._sums is None:
            return
        from zoo.io import crc32c

        for number, part in enumerate(torch.split(memory, BLOCK_BYTES), block):
            if crc32c(part) != int(self._sums[number]):
                begin = number * BLOCK_BYTES
                raise DamageError(
                    f"the bytes {begin} to {begin + part.numel() - 1} of the file {self.name} have another CRC-32C "
                    "than the index says: they were changed or damaged after they were written"
                )

    def check(self) -> None:
        """Read all of it; raises DamageError as :meth:`read` does."""
        step = 16 * BLOCK_BYTES
        memory = torch.empty(min(step, self.size), dtype=torch.uint8)
        for begin in range(0, self.size, step):
            self._straight(memory[: min(step, self.size - begin)], begin // BLOCK_BYTES)
