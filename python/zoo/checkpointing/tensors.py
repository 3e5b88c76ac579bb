"""A safetensors file written one tensor after the other, so that what is saved need not be in memory together.

The format (https://github.com/huggingface/safetensors, README, "Format"): the length of the header in 8 bytes, little
endian; the header in JSON; the bytes of all tensors without gaps. The safetensors library writes such a file only from
tensors that all exist; it is what reads ours.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.names import parse_key

_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A flat tensor to be written; ``load`` is called once, when its turn comes."""

    key: str
    dtype: torch.dtype
    length: int
    load: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.length * self.dtype.itemsize


def write_tensors(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write the file and force it to the disk; returns its size and hexadecimal SHA-256.

    Raises:
        CheckpointError: a dtype that the format has no code for, or a tensor that is not what its entry says.
    """
    # Wide elements first: then every tensor begins at a multiple of its element's size.
    ordered = sorted(entries, key=lambda e: (-e.dtype.itemsize, e.key))
    header = _header(ordered, metadata)
    digest, size = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for part in (len(header).to_bytes(8, "little"), header):
            digest.update(part)
            size += file.write(part)
        for entry in ordered:
            raw = _bytes_of(entry)
            digest.update(raw)
            size += file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _header(entries: list[Entry], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        if entry.dtype not in _CODES:
            raise CheckpointError(
                f"{entry.key!r} is {entry.dtype}; a safetensors file holds {', '.join(map(str, _CODES))}."
            )
        begin, end = end, end + entry.num_bytes
        described[entry.key] = {"dtype": _CODES[entry.dtype], "shape": [entry.length], "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _bytes_of(entry: Entry) -> memoryview:
    tensor = entry.load()
    if tensor.dim() != 1 or tensor.numel() != entry.length or tensor.dtype is not entry.dtype:
        role, name, _ = parse_key(entry.key)
        raise CheckpointError(
            f"the slice of {role} {name!r} says {entry.length} elements of {entry.dtype} and comes with a tensor of "
            f"shape {tuple(tensor.shape)} of {tensor.dtype}; it must be flat and of that length"
        )
    raw: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return memoryview(raw)
