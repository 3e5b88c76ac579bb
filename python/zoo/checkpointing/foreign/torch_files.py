"""Files of ``torch.save``, the present format (a zip archive) and the one before torch 1.6, without unpickling them.

The zip archive has one folder with ``data.pkl``, the values, and ``data/<key>``, the bytes of each storage,
uncompressed (https://docs.pytorch.org/docs/stable/notes/serialization.html). The older file is five pickles (a magic
number, the version, sizes of C types, the values, the keys of storages) and then, for each key, the number of its
elements in eight bytes and the bytes.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.foreign.known import Storage, StorageKind
from zoo.checkpointing.foreign.regions import Region, RegionFile, is_size
from zoo.checkpointing.foreign.unpickling import Unpickled, unpickle

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_PICKLE_BYTES = 2 << 30


def load_torch(source: Path | Region, *, verify: bool = True) -> Unpickled:
    """The value of a file of ``torch.save``; its tensors are ``StoredTensor``, not yet read.

    Args:
        source: a path, or a region of an open file.
        verify: compare every storage with the CRC-32 that the archive has for it (the older format has none).

    Raises:
        CheckpointError: it is no such file, is damaged, or holds what checkpoints do not (see
            :mod:`zoo.checkpointing.foreign.unpickling`).
    """
    region = source if isinstance(source, Region) else Region.open(source)
    if region.size >= 4 and region.bytes(0, 4) == b"PK\x03\x04":
        return _Archive(region, verify).load()
    return _load_legacy(region)


class _Archive:
    """The entries of a zip archive, each checked to be uncompressed bytes of the file that no other entry has."""

    def __init__(self, region: Region, verify: bool) -> None:
        self.region, self.verify = region, verify
        self.what = f"the file {region.name}"
        self.entries: dict[str, tuple[Region, int]] = {}
        self.storages: dict[str, Region] = {}
        infos = self._directory()
        end = 0
        for info in sorted(infos, key=lambda info: info.header_offset):
            start = self._check(info)
            if info.header_offset < end:
                raise CheckpointError(f"{self.what} has entries that overlap, {info.filename!r} among them")
            end = start + info.file_size
            self.entries[info.filename] = (region.part(start, info.file_size, region.name), info.CRC)
        roots = {name.partition("/")[0] for name in self.entries}
        if len(roots) != 1:
            raise CheckpointError(f"{self.what} has entries in {len(roots)} folders; torch.save makes one")
        self.root = roots.pop()

    def _directory(self) -> list[zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(RegionFile(self.region)) as archive:
                return archive.infolist()
        except CheckpointError:
            raise
        except (
            zipfile.BadZipFile, struct.error, ValueError, KeyError, IndexError, OverflowError, NotImplementedError,
            EOFError, RuntimeError, OSError,
        ) as error:  # fmt: skip
            raise CheckpointError(f"{self.what} is no whole archive: {error}") from None

    def _check(self, info: zipfile.ZipInfo) -> int:
        """Where the bytes of an entry begin."""
        name, parts = info.filename, info.filename.split("/")
        odd = "\\" in name or "\0" in name or len(parts) < 2 or any(part in ("", ".", "..") for part in parts)
        if odd or name in self.entries or len(name) > 1024:
            raise CheckpointError(f"{self.what} has an entry {name[:80]!r}, a name that torch.save does not make")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 0x2041:
            raise CheckpointError(f"{self.what} has {name!r} compressed or encrypted; torch.save stores plain bytes")
        local = _LOCAL.unpack(self.region.bytes(info.header_offset, _LOCAL.size))
        start: int = info.header_offset + _LOCAL.size + local[9] + local[10]
        raw = self.region.bytes(info.header_offset + _LOCAL.size, local[9])
        if local[0] != b"PK\x03\x04" or raw != name.encode() or start + info.file_size > self.region.size:
            raise CheckpointError(f"{self.what} has {name!r} where its directory does not say, or not whole")
        return start

    def entry(self, name: str) -> Region:
        """The bytes of an entry, checked."""
        found = self.entries.get(f"{self.root}/{name}")
        if found is None:
            raise CheckpointError(f"{self.what} has no entry {name[:80]!r}")
        region, crc = found
        if self.verify and region.crc32() != crc:
            raise CheckpointError(f"{self.what} is damaged: {name!r} does not have its CRC-32")
        return region

    def load(self) -> Unpickled:
        if f"{self.root}/byteorder" in self.entries and self.entry("byteorder").size != 6:
            raise CheckpointError(f"{self.what} is in another byte order than little endian, which alone is read")
        region = self.entry("data.pkl")
        if region.size > _MAX_PICKLE_BYTES:
            raise CheckpointError(
                f"{self.what} has a pickle of {region.size} bytes; at most {_MAX_PICKLE_BYTES} are read"
            )
        raw = region.bytes()
        if zlib.crc32(raw) != self.entries[f"{self.root}/data.pkl"][1]:
            raise CheckpointError(f"{self.what} is damaged: 'data.pkl' does not have its CRC-32")
        found = unpickle(raw, self.what, persistent=self._storage)
        if self.verify:  # what belongs to no storage as well: version and the like
            known = {f"{self.root}/data/{key}" for key in self.storages} | {f"{self.root}/data.pkl"}
            for name in self.entries.keys() - known:
                self.entry(name.partition("/")[2])
        return found

    def _storage(self, identity: Any) -> Storage:
        kind, key, numel = _identity(identity, self.what)
        if key not in self.storages:
            self.storages[key] = self.entry(f"data/{key}")
        data = self.storages[key]
        if numel * kind.dtype.itemsize != data.size:
            raise CheckpointError(
                f"{self.what} has {data.size} bytes in the storage {key!r}, which is said to be {numel} elements of "
                f"{kind.dtype}"
            )
        return Storage(data, kind.dtype)


def _identity(identity: Any, what: str) -> tuple[StorageKind, str, int]:
    """Kind, key and elements of ("storage", kind, key, location, numel, …)."""
    right = (
        isinstance(identity, tuple)
        and len(identity) in (5, 6)
        and identity[0] == "storage"
        and isinstance(identity[1], StorageKind)
        and isinstance(identity[2], str)
        and 0 < len(identity[2]) <= 100
        and is_size(identity[4])
        and (len(identity) == 5 or identity[5] is None)
    )
    if not right:
        raise CheckpointError(
            f"{what} refers to something outside of its pickle that is no storage of a dtype known here"
        )
    return identity[1], identity[2], identity[4]


def _load_legacy(region: Region) -> Unpickled:
    what = f"the file {region.name}"
    # The pickles come first and say how long they are only by ending; so all is read, which a file of now never is.
    if region.size > _MAX_PICKLE_BYTES:
        raise CheckpointError(
            f"{what} is no archive, and too large to be read as a file of torch before 1.6; load it with torch and "
            "save it again"
        )
    raw = region.bytes()
    if not raw.startswith(b"\x80\x02\x8a\n"):
        raise CheckpointError(f"{what} was not written by torch.save")
    at, heads = 0, []
    for _ in range(3):
        head = unpickle(raw, what, start=at)
        heads.append(head.value)
        at = head.end
    little = isinstance(heads[2], dict) and heads[2].get("little_endian") is True
    if heads[0] != _LEGACY_MAGIC or heads[1] != _LEGACY_VERSION or not little:
        raise CheckpointError(f"{what} was not written by torch.save on a little-endian machine")
    seen: dict[str, tuple[StorageKind, int, Storage]] = {}

    def persistent(identity: Any) -> Storage:
        kind, key, numel = _identity(identity, what)
        if key not in seen:
            # Where it is, is known only at the end; until then it says its size.
            size = numel * kind.dtype.itemsize
            seen[key] = (kind, numel, Storage(region.part(0, size, region.name), kind.dtype))
        if seen[key][:2] != (kind, numel):
            raise CheckpointError(f"{what} describes the storage {key!r} in two ways")
        return seen[key][2]

    found = unpickle(raw, what, start=at, persistent=persistent)
    keys = unpickle(raw, what, start=found.end)
    if not isinstance(keys.value, list) or sorted(map(str, keys.value)) != sorted(seen):
        raise CheckpointError(f"{what} lists other storages than its tensors have")
    at = keys.end
    for key in keys.value:
        kind, numel, storage = seen[key]
        if len(raw) - at < 8 or int.from_bytes(raw[at : at + 8], "little") != numel:
            raise CheckpointError(f"{what} is damaged: the storage {key!r} has another size than it is said to have")
        storage.data.start = region.part(at + 8, numel * kind.dtype.itemsize, region.name).start
        at += 8 + numel * kind.dtype.itemsize
    if at != len(raw):
        raise CheckpointError(f"{what} has {len(raw) - at} bytes more than its storages")
    return found


def tensors_of(value: Any, what: str) -> dict[str, Any]:
    """The tensors of a state_dict, by name.

    Raises:
        CheckpointError: it is no dict of names.
    """
    if not isinstance(value, dict) or any(not isinstance(key, str) for key in value):
        raise CheckpointError(f"{what} holds no dict of tensors by name")
    return value


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor`` in another dtype, itself if it has that."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)
