"""The manifest: parsed and checked by hand, because it comes from outside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpointing.disk import sha256_of
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.exact import decode, dtype_named
from zoo.checkpointing.names import MANIFEST, check_file, file_of
from zoo.checkpointing.writing import FORMAT, READABLE


@dataclass(frozen=True)
class FileEntry:
    """One file of the checkpoint: its name, size in bytes and SHA-256."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What rank 0 wrote last. ``roles[name][role]`` is the dtype of a tensor's role."""

    world_size: int
    meta: dict[str, Any]
    scalars: dict[str, float | int]
    shapes: dict[str, tuple[int, ...]]
    roles: dict[str, dict[str, str]]
    files: tuple[FileEntry, ...]


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory ``path``.

    Raises:
        CheckpointError: not there, not JSON, of another format or version, or with a field that is not what it must be.
    """
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{str(path)!r} has no {MANIFEST}: it is not a checkpoint, or one that was never finished"
        )
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{str(file)!r} is not a manifest of the format {FORMAT!r}")
    if document.get("version") not in READABLE:
        raise CheckpointError(
            f"{str(file)!r} has version {document.get('version')!r}; this zoo reads version "
            f"{' and '.join(map(str, READABLE))}"
        )
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(file)!r} has a field that is missing or of the wrong kind: {error!r}") from None


def _parse(document: dict[str, Any]) -> Manifest:
    files = tuple(
        FileEntry(check_file(entry["name"]), int(entry["size"]), str(entry["sha256"])) for entry in document["files"]
    )
    world_size = int(document["world_size"])
    if [entry.name for entry in files] != [file_of(rank) for rank in range(world_size)]:
        raise CheckpointError(
            f"the manifest is of {world_size} ranks and lists the files {', '.join(e.name for e in files)}; there "
            f"must be "
            "one for each rank, in order"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    roles: dict[str, dict[str, str]] = {}
    for entry in document["tensors"]:
        name, shape = str(entry["name"]), tuple(int(d) for d in entry["shape"])
        if name in shapes or any(d < 0 for d in shape):
            raise CheckpointError(f"the manifest lists {name!r} twice, or with a negative dim: {shape}")
        shapes[name] = shape
        roles[name] = {str(role): str(dtype) for role, dtype in entry["roles"].items()}
        for dtype in roles[name].values():
            dtype_named(dtype)
    scalars = {str(key): value for key, value in document["scalars"].items()}
    for key, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"the number {key!r} of the manifest is {value!r}")
    # Version 1 held only what JSON holds.
    meta = decode(document["meta"], "meta") if document["version"] > 1 else document["meta"]
    return Manifest(world_size, dict(meta), scalars, shapes, roles, files)


def check_directory(path: Path, manifest: Manifest) -> None:
    """Every file of the manifest is there with its size, and no other file.

    Raises:
        CheckpointError: names the file.
    """
    for entry in manifest.files:
        file = path / entry.name
        if not file.is_file() or file.is_symlink():
            raise CheckpointError(f"the file {entry.name} is missing from {str(path)!r}")
        size = file.stat().st_size
        if size != entry.size:
            raise CheckpointError(f"the file {entry.name} has {size} bytes; the manifest says {entry.size}")
    known = {MANIFEST, *(entry.name for entry in manifest.files)}
    unknown = sorted(found.name for found in path.iterdir() if found.name not in known)
    if unknown:
        raise CheckpointError(f"{str(path)!r} holds {', '.join(unknown)}, which the manifest does not know")


def check_sum(path: Path, entry: FileEntry) -> None:
    """Raise CheckpointError unless the file has the SHA-256 that the manifest gives."""
    found = sha256_of(path / entry.name)
    if found != entry.sha256:
        raise CheckpointError(
            f"the file {entry.name} has SHA-256 {found[:16]}…, the manifest says {entry.sha256[:16]}…: it was changed "
            f"or "
            "damaged after it was written"
        )
