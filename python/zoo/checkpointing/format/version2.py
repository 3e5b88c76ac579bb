"""Checkpoints of versions 1 and 2: files of ranks, with all tensors and files in the manifest. They are only read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import Disk
from zoo.checkpointing.format.exact import dtype_named
from zoo.checkpointing.format.index import FileEntry, Index, State, empty_columns
from zoo.checkpointing.format.manifest import world_size_of
from zoo.checkpointing.format.names import RANK_ROLE, check_file, old_file_of, parse_key
from zoo.checkpointing.format.tensors import CODES

_DTYPES = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}
_MOST_HEADER_BYTES = 1 << 30


def index_of(disk: Disk, path: Path, document: dict[str, Any]) -> tuple[Index, list[str]]:
    """The index of such a checkpoint, from its manifest and the headers of its files; and the SHA-256 of each file.

    Raises:
        CheckpointError: names what is wrong.
    """
    try:
        return _index_of(disk, path, document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r} has a field that is missing or of the wrong kind: {error!r}") from None


def check_sum(disk: Disk, path: Path, entry: FileEntry, sha256: str) -> None:
    """Raise CheckpointError unless a file has the SHA-256 that the manifest gives."""
    digest, source = hashlib.sha256(), disk.open(path / entry.name)
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    try:
        for begin in range(0, entry.size, len(memory)):
            digest.update(memory[: source.read(memory, begin)].numpy().tobytes())
    finally:
        source.close()
    if digest.hexdigest() != sha256:
        raise CheckpointError(
            f"the file {entry.name} has SHA-256 {digest.hexdigest()[:16]}…, the manifest says {sha256[:16]}…: it was "
            "changed or damaged after it was written"
        )


def _index_of(disk: Disk, path: Path, document: dict[str, Any]) -> tuple[Index, list[str]]:
    given, size = document["files"], world_size_of(document)
    names = [check_file(entry["name"]) for entry in given]
    if len(names) != size or names != [old_file_of(rank) for rank in range(size)]:
        raise CheckpointError(
            f"the manifest is of {size} ranks and lists the files {', '.join(names)}; there must be one for each rank, "
            "in order"
        )
    files = [FileEntry(name, int(entry["size"])) for name, entry in zip(names, given, strict=True)]
    states: list[State] = []
    for entry in document["tensors"]:
        for role, dtype in entry["roles"].items():
            dtype_named(dtype)
            states.append(State(str(entry["name"]), str(role), dtype, tuple(int(d) for d in entry["shape"])))
            if any(d < 0 for d in states[-1].shape):
                raise CheckpointError(f"the manifest has {entry['name']!r} with a negative dim: {states[-1].shape}")
    number_of = {(state.name, state.role): number for number, state in enumerate(states)}
    rows: list[tuple[int, int, int, int, int]] = []
    own_names: list[tuple[str, str]] = []
    own: list[tuple[int, int, int, int, int]] = []
    for rank, file in enumerate(files):
        for key, dtype, length, offset in _header(disk, path / file.name, file):
            role, name, start = parse_key(key)
            if role == RANK_ROLE:
                own.append((rank, len(own_names), length, rank, offset))
                own_names.append((name, dtype))
                continue
            number = number_of.get((name, role))
            if number is None:
                raise CheckpointError(f"{file.name} holds {role} {name!r}, which the manifest does not know")
            if states[number].dtype != dtype:
                raise CheckpointError(
                    f"{role} {name!r} is {dtype} in the files and {states[number].dtype} in the manifest"
                )
            rows.append((number, start, length, rank, offset))
    rows.sort()
    columns = empty_columns()
    for names_of, found in (
        (("state", "start", "length", "file", "offset"), rows),
        (("own_rank", "own_name", "own_length", "own_file", "own_offset"), own),
    ):
        for place, name in enumerate(names_of):
            columns[name] = np.array([row[place] for row in found], dtype=columns[name].dtype)
    index = Index(states, own_names, files, columns)
    index.check()
    return index, [str(entry["sha256"]) for entry in given]


def _header(disk: Disk, path: Path, file: FileEntry) -> list[tuple[str, str, int, int]]:
    """(key, dtype, elements, first byte) of the tensors of a safetensors file."""
    try:
        source = disk.open(path)
    except OSError:
        raise CheckpointError(f"the file {file.name} is missing from {str(path.parent)!r}") from None
    try:
        if source.size() != file.size:
            raise CheckpointError(f"the file {file.name} has {source.size()} bytes; the manifest says {file.size}")
        head = torch.zeros(8, dtype=torch.uint8)
        source.read(head, 0)
        size = int.from_bytes(head.numpy().tobytes(), "little")
        if not 0 < size <= min(file.size - 8, _MOST_HEADER_BYTES):
            raise CheckpointError(f"the file {file.name} is not in the safetensors format")
        text = torch.empty(size, dtype=torch.uint8)
        source.read(text, 8)
    finally:
        source.close()
    found = []
    for key, entry in json.loads(text.numpy().tobytes()).items():
        if key == "__metadata__":
            continue
        begin, end = (int(place) for place in entry["data_offsets"])
        dtype, shape = _DTYPES.get(entry["dtype"], str(entry["dtype"])), entry["shape"]
        if len(shape) != 1:
            raise CheckpointError(f"{key!r} in {file.name} has shape {shape}; slices are flat")
        if end - begin != shape[0] * dtype_named(dtype).itemsize:
            raise CheckpointError(f"{key!r} in {file.name} has {end - begin} bytes for {shape[0]} of {dtype}")
        found.append((key, dtype, int(shape[0]), 8 + size + begin))
    return found
