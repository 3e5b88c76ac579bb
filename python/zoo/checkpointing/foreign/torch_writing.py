"""Files that ``torch.load(weights_only=True)`` reads, written tensor by tensor.

``torch.save`` wants all tensors at once. Here their dtypes and shapes are said at the beginning, so the pickle (a dict
of tensors by name) and the place of every storage are known; values come in any order. The archive is that of
``torch.save``: uncompressed entries, each storage at a multiple of 64 bytes, with CRC-32.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.known import STAND_INS, StorageKind
from zoo.checkpointing.format.tensors import NewFile

_ROOT, _ALIGNMENT, _LARGE = "archive", 64, 0xFFFFFFFF
_TYPED = {
    kind.dtype: name
    for (module, name), kind in STAND_INS.items()
    if module == "torch" and isinstance(kind, StorageKind) and name != "UntypedStorage"
}
_UNTYPED = (
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip


@dataclass
class _Entry:
    """An entry of the archive: ``header`` is where its local header begins, ``start`` its bytes."""

    name: bytes
    size: int
    header: int
    start: int
    crc: int = 0


class TorchFile(NewFile):
    """A file of tensors by name for ``torch.load``: see :class:`zoo.checkpointing.format.tensors.NewFile`.

    Args:
        path: of the file, in a folder that exists.
        described: dtype and shape by key.
        tied: further names of tensors: they are the same storage when the file is read.

    Raises:
        CheckpointError: a dtype of which torch saves no storages, or a further name of nothing.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        pickle = _pickle(described, dict(tied or {}))
        self._plain = {"data.pkl": pickle, "byteorder": b"little", "version": b"3\n"}
        self._stop = 0
        self._entries = {name: self._place(name, len(raw)) for name, raw in self._plain.items()}
        self._storages = {
            key: self._place(f"data/{number}", math.prod(shape) * dtype.itemsize)
            for number, (key, (dtype, shape)) in enumerate(described.items())
        }
        super().__init__(path, described)

    def _begin(self) -> None:
        for name, raw in self._plain.items():
            entry = self._entries[name]
            entry.crc = zlib.crc32(raw)
            self._file.seek(entry.start)
            self._file.write(raw)

    def _place_of(self, key: str) -> int:
        return self._storages[key].start

    def _wrote(self, key: str, raw: memoryview) -> None:
        entry = self._storages[key]
        entry.crc = zlib.crc32(raw, entry.crc)

    def _end(self) -> None:
        entries = [*self._entries.values(), *self._storages.values()]
        for entry in entries:
            self._file.seek(entry.header)
            self._file.write(_local(entry))
        self._file.seek(self._stop)
        self._file.write(_directory(entries, self._stop))

    def _place(self, name: str, size: int) -> _Entry:
        path = f"{_ROOT}/{name}".encode()
        header = self._stop
        before = header + 30 + len(path) + (20 if size >= _LARGE else 0)
        start = before + 4  # of an extra field that fills up to the alignment
        start += -start % _ALIGNMENT
        self._stop = start + size
        return _Entry(path, size, header, start)


# -- the archive (PKWARE, ".ZIP File Format Specification", 4.3) ------------------------------------------------------


def _local(entry: _Entry) -> bytes:
    large = entry.size >= _LARGE
    extra = struct.pack("<2H2Q", 1, 16, entry.size, entry.size) if large else b""
    room = entry.start - entry.header - 30 - len(entry.name) - len(extra) - 4
    extra += b"FB" + struct.pack("<H", room) + b"Z" * room
    size = _LARGE if large else entry.size
    head = struct.pack(
        "<4s5H3L2H",
        b"PK\x03\x04",
        45 if large else 20,
        0,
        0,
        0,
        0x21,
        entry.crc,
        size,
        size,
        len(entry.name),
        len(extra),
    )
    return head + entry.name + extra


def _directory(entries: list[_Entry], start: int) -> bytes:
    out = []
    for entry in entries:
        values = [value for value in (entry.size, entry.size, entry.header) if value >= _LARGE]
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        size, header = min(entry.size, _LARGE), min(entry.header, _LARGE)
        version = 45 if values else 20
        out.append(
            struct.pack(
                "<4s6H3L5H2L", b"PK\x01\x02", version, version, 0, 0, 0, 0x21, entry.crc, size, size, len(entry.name),
                len(extra), 0, 0, 0, 0, header,
            ) + entry.name + extra
        )  # fmt: skip
    body = b"".join(out)
    many, long, far = len(entries) >= 0xFFFF, len(body) >= _LARGE, start >= _LARGE
    if many or long or far:
        count = len(entries)
        body += struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(body), start)
        end_of = start + sum(map(len, out))
        body += struct.pack("<4sLQL", b"PK\x06\x07", 0, end_of, 1)
    count, size = min(len(entries), 0xFFFF), min(sum(map(len, out)), _LARGE)
    return body + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, min(start, _LARGE), 0)


# -- the pickle (protocol 2) ------------------------------------------------------------------------------------------


def _pickle(described: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tied: Mapping[str, str]) -> bytes:
    keys = {key: number for number, key in enumerate(described)}
    out = [b"\x80\x02ccollections\nOrderedDict\n)R("]
    for name in (*described, *tied):
        target = tied.get(name, name)
        if target not in described or (name in tied and name in described):
            raise CheckpointError(f"{name!r} is said to be another name of {target!r}, which is not in the file")
        out += [_text(name), _tensor(keys[target], *described[target])]
    return b"".join(out) + b"u."


def _tensor(key: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    numel = math.prod(shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    sizes = _number(0) + _tuple([_number(d) for d in shape]) + _tuple([_number(s) for s in strides])
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    if dtype in _TYPED:
        storage = _storage(b"ctorch\n" + _TYPED[dtype].encode() + b"\n", key, numel)
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + sizes + hooks + b"tR"
    if dtype not in _UNTYPED:
        names = ", ".join(map(str, (*_TYPED, *_UNTYPED)))
        raise CheckpointError(f"torch.save has no storages of {dtype}; it has them of {names}")
    storage = _storage(b"ctorch.storage\nUntypedStorage\n", key, numel * dtype.itemsize)
    name = f"ctorch\n{str(dtype).removeprefix('torch.')}\n".encode()
    return b"ctorch._utils\n_rebuild_tensor_v3\n(" + storage + sizes + hooks + name + b"tR"


def _storage(kind: bytes, key: int, size: int) -> bytes:
    return b"(" + _text("storage") + kind + _text(str(key)) + _text("cpu") + _number(size) + b"tQ"


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    return b"K" + bytes([value]) if value < 256 else b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def _tuple(parts: list[bytes]) -> bytes:
    return b"(" + b"".join(parts) + b"t"
