"""GGUF files, read: metadata, and tensors as fp32 or as they are stored, a run of blocks at a time.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; blocks of quantised types as in
``ggml-quants``. With d, m in fp16 (q: the stored integers, by element i of a block):

===== ======== ===== ================================================================================================
type  elements bytes value
===== ======== ===== ================================================================================================
Q4_0  32       18    d (q - 8); element i < 16 is the low half of byte i, element i + 16 the high half
Q4_1  32       20    d q + m, halves as in Q4_0
Q8_0  32       34    d q
Q4_K  256      144   d s_j q - m t_j with 6-bit s, t of 8 parts of 32; parts 2k and 2k + 1 are low and high halves
Q6_K  256      210   d s_j (q - 32) with 8-bit s of 16 parts of 16; 4 bits of q in one place and 2 in another
===== ======== ===== ================================================================================================
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.pieces import ForeignCheckpoint
from zoo.checkpointing.foreign.regions import Region, StoredTensor

_WINDOW_BYTES = 1 << 20
_MAX_DIMS = 8
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_PLAIN = {
    0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32, 27: torch.int64,
    28: torch.float64, 30: torch.bfloat16,
}  # fmt: skip


def load_gguf(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """The tensors of a GGUF file in role "parameter", under the file's names; its metadata is ``meta["metadata"]``.

    Shapes are in the order of torch (the file has them backwards). Quantised tensors read as fp32.

    Raises:
        CheckpointError: no such file, counts or places that it has no bytes for, or a type that is not read.
    """
    place = Path(path)
    region = Region.open(place, follow_links=True)
    cursor = _Cursor(region)
    if cursor.take(4) != b"GGUF":
        raise CheckpointError(f"the file {place.name} is not in the format GGUF")
    version, tensors, values = cursor.unpack("<I"), cursor.unpack("<Q"), cursor.unpack("<Q")
    if version not in (2, 3):
        raise CheckpointError(f"{place.name} has version {version} of GGUF, or is big endian; 2 and 3 are read")
    cursor.expect(values, 13, "values")
    cursor.expect(tensors, 24, "tensors")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.text()
        if key in metadata:
            raise CheckpointError(f"{place.name} has the value {key[:80]!r} twice")
        metadata[key] = cursor.value(cursor.unpack("<I"), 0)
    described = [_described(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
        raise CheckpointError(f"{place.name} says an alignment of {str(alignment)[:40]}")
    start = cursor.at + -cursor.at % alignment
    found = ForeignCheckpoint(place.name, place)
    ends: list[tuple[int, int]] = []
    for name, shape, kind, offset in described:
        tensor = _tensor(region, name, shape, kind, start + offset)
        ends.append((start + offset, start + offset + tensor.data.size))
        found.add_whole(name, "parameter", tensor)
    last = start
    for low, high in sorted(end for end in ends if end[0] < end[1]):
        if low < last:
            raise CheckpointError(f"{place.name} has tensors that overlap at byte {low}")
        last = high
    found.meta["metadata"] = metadata
    return found


def _described(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dims = cursor.text(), cursor.unpack("<I")
    if dims > _MAX_DIMS:
        raise CheckpointError(f"{cursor.region.path.name} has a tensor of {dims} dims")
    sizes = tuple(cursor.unpack("<Q") for _ in range(dims))
    return name, sizes[::-1], cursor.unpack("<I"), cursor.unpack("<Q")


def _tensor(region: Region, name: str, shape: tuple[int, ...], kind: int, at: int) -> StoredTensor | QuantisedTensor:
    numel = math.prod(shape)
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        data = region.part(at, numel * dtype.itemsize, region.path.name)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return StoredTensor.checked(data, dtype, 0, shape, strides, what=repr(name[:80]))
    block = BLOCKS.get(kind)
    if block is None:
        raise CheckpointError(
            f"{name[:80]!r} in {region.path.name} is of type {kind}; read are F64, F32, F16, BF16, integers, "
            f"{', '.join(b.name for b in BLOCKS.values())}"
        )
    if not shape or shape[-1] % block.elements or numel // block.elements * block.bytes > region.size:
        raise CheckpointError(f"{name[:80]!r} of {shape} in {region.path.name} is not made of blocks of {block.name}")
    return QuantisedTensor(region.part(at, numel // block.elements * block.bytes, region.path.name), shape, block)


class _Cursor:
    """Reads a file from its beginning on, some of it at a time."""

    def __init__(self, region: Region) -> None:
        self.region, self.at = region, 0
        self._from, self._window = 0, b""

    def take(self, count: int) -> bytes:
        if self.at + count > self.region.size:
            raise CheckpointError(f"{self.region.path.name} ends in the middle of its header, at byte {self.at}")
        low = self.at - self._from
        if low < 0 or low + count > len(self._window):
            size = min(max(count, _WINDOW_BYTES), self.region.size - self.at)
            self._from, self._window, low = self.at, self.region.bytes(self.at, size), 0
        self.at += count
        return self._window[low : low + count]

    def unpack(self, form: str) -> int:
        found: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return found

    def expect(self, count: int, least: int, what: str) -> None:
        """Raise unless ``count`` things of at least ``least`` bytes may still come."""
        if count > (self.region.size - self.at) // least:
            raise CheckpointError(f"{self.region.path.name} says {count} {what}, more than it has bytes for")

    def text(self) -> str:
        count = self.unpack("<Q")
        self.expect(count, 1, "characters")
        return self.take(count).decode("utf-8", "replace")

    def value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth > 3:
            raise CheckpointError(f"{self.region.path.name} has a value of type {kind}, at byte {self.at}")
        inner, count = self.unpack("<I"), self.unpack("<Q")
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner])
            self.expect(count, dtype.itemsize, "values")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).copy()
        self.expect(count, 8 if inner == _STRING else 12, "values")
        return [self.value(inner, depth + 1) for _ in range(count)]


# -- blocks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A quantised type: elements and bytes of a block, and (blocks, bytes) of uint8 → (blocks, elements) of fp32."""

    name: str
    elements: int
    bytes: int
    values: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class QuantisedTensor:
    """A tensor in blocks, which reads as fp32: the blocks that a run touches, some MiB at a time."""

    data: Region
    shape: tuple[int, ...]
    block: Block

    @property
    def dtype(self) -> torch.dtype:
        """Of what is read."""
        return torch.float32

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of its row-major order, flat."""
        length = self.numel - start if length is None else length
        if start < 0 or length < 0 or start + length > self.numel:
            raise CheckpointError(f"[{start}, {start + length}) lies outside of a tensor of {self.numel} elements")
        out = torch.empty(length)
        size, many = self.block.elements, max(_WINDOW_BYTES // self.block.bytes, 1)
        stop = -(-(start + length) // size)
        for first in range(start // size, stop if length else 0, many):
            count = min(many, stop - first)
            raw = self.data.bytes(first * self.block.bytes, count * self.block.bytes)
            values = self.block.values(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(count, -1)).reshape(-1)
            low, high = max(first * size, start), min((first + count) * size, start + length)
            out[low - start : high - start] = values[low - first * size : high - first * size]
        return out


def _half(raw: torch.Tensor) -> torch.Tensor:
    """(blocks, 2) bytes → (blocks, 1) numbers."""
    return raw.contiguous().view(torch.float16).float()


def _q4_0(raw: torch.Tensor) -> torch.Tensor:
    q = torch.cat([raw[:, 2:] & 15, raw[:, 2:] >> 4], dim=1)
    return _half(raw[:, :2]) * (q.float() - 8)


def _q4_1(raw: torch.Tensor) -> torch.Tensor:
    q = torch.cat([raw[:, 4:] & 15, raw[:, 4:] >> 4], dim=1)
    return _half(raw[:, :2]) * q.float() + _half(raw[:, 2:4])


def _q8_0(raw: torch.Tensor) -> torch.Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).float()


def _q4_k(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.shape[0]
    d, m = _half(raw[:, :2]), _half(raw[:, 2:4])
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=1).float()
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=1).float()
    packed = raw[:, 16:].view(blocks, 4, 1, 32)
    q = torch.cat([packed & 15, packed >> 4], dim=2).view(blocks, 8, 32).float()
    return ((d * scales).unsqueeze(2) * q - (m * minima).unsqueeze(2)).view(blocks, 256)


def _q6_k(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.shape[0]
    low = raw[:, :128].view(blocks, 2, 64)  # of each half of the block
    high = raw[:, 128:192].view(blocks, 2, 32)
    scales = raw[:, 192:208].contiguous().view(torch.int8).float()
    fours = torch.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4], dim=2)
    twos = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    q = (fours | (twos << 4)).float() - 32  # (blocks, 2, 4, 32)
    return ((_half(raw[:, 208:]) * scales).view(blocks, 16, 1) * q.view(blocks, 16, 16)).view(blocks, 256)


BLOCKS = {
    2: Block("Q4_0", 32, 18, _q4_0),
    3: Block("Q4_1", 32, 20, _q4_1),
    8: Block("Q8_0", 32, 34, _q8_0),
    12: Block("Q4_K", 256, 144, _q4_k),
    14: Block("Q6_K", 256, 210, _q6_k),
}
"""The file's number of a quantised type → its blocks."""
