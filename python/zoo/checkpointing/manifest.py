"""The manifest: parsed and checked by hand, because it comes from outside. Its appearance is the checkpoint.

Since version 3: the name, size and SHA-256 of the index, the numbers, what the job keeps beside tensors, and the
SHA-256 of all that. Versions 1 and 2 had the tensors and files in it (:mod:`zoo.checkpointing.version2`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpointing.disk import Disk, read_file
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.exact import decode
from zoo.checkpointing.names import ATTEMPT, MANIFEST, check_index, file_of, tag_of

FORMAT = "zoo-checkpoint"
VERSION = 4
READABLE = (1, 2, 3, 4)
"""Versions that are read. 2: ``meta`` as zoo.checkpointing.exact writes it. 3: an index beside it. 4: boxes in it."""
INDEXED = 3
"""The first version with an index."""
SUM = "sha256"
"""Key of the manifest's own checksum; where there is none, as in older ones, nothing is compared."""
MOST_BYTES = 1 << 30
_MOST_RANKS = 1 << 24


@dataclass(frozen=True)
class Manifest:
    """What rank 0 wrote last. ``number``: later ones of a directory have larger ones."""

    version: int
    attempt: str
    number: int
    world_size: int
    meta: dict[str, Any]
    scalars: dict[str, float | int]
    index: str
    index_size: int
    index_sha256: str


def read_document(disk: Disk, path: Path) -> dict[str, Any]:
    """The manifest in the directory ``path`` as JSON, of a version that can be read.

    Raises:
        CheckpointError: not there, not JSON, of another format or version.
    """
    file = path / MANIFEST
    try:
        text = read_file(disk, file, MOST_BYTES)
    except OSError:
        raise CheckpointError(
            f"{str(path)!r} has no {MANIFEST}: it is not a checkpoint, or one that was never finished"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{str(file)!r} cannot be read: {error}") from None
    return parse(text, str(file))


def parse(text: bytes, where: str) -> dict[str, Any]:
    """See :func:`read_document`."""
    try:
        document = json.loads(text.decode("utf-8"))
        found = sum_of(document) if isinstance(document, dict) else ""
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where!r} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{where!r} is not a manifest of the format {FORMAT!r}")
    if document.get("version") not in READABLE or isinstance(document["version"], bool):
        raise CheckpointError(
            f"{where!r} has version {document.get('version')!r}; this zoo reads version {', '.join(map(str, READABLE))}"
        )
    if document.get(SUM, found) != found:
        raise CheckpointError(f"{where!r} has another SHA-256 than it says: it was changed or damaged")
    return document


def sum_of(document: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own entry :data:`SUM`: of the JSON with sorted keys and no space."""
    content = {key: value for key, value in document.items() if key != SUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_of(document: dict[str, Any], where: str) -> Manifest:
    """The fields since version 3.

    Raises:
        CheckpointError: one of them is missing, or not what it must be.
    """
    try:
        index = document["index"]
        return Manifest(
            version=document["version"], attempt=_attempt(document["attempt"]),
            number=_size("number", document["number"]), world_size=world_size_of(document),
            meta=meta_of(document), scalars=scalars_of(decode(document["scalars"], "scalars")),
            index=check_index(index["name"]), index_size=_size("size of the index", index["size"]),
            index_sha256=str(index["sha256"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where!r} has a field that is missing or of the wrong kind: {error!r}") from None


def world_size_of(document: dict[str, Any]) -> int:
    """Ranks of the job that wrote it."""
    size = _size("world_size", document["world_size"])
    if not 0 < size <= _MOST_RANKS:
        raise CheckpointError(f"the manifest says world_size = {size}; a job has 1 to {_MOST_RANKS:,} ranks")
    return size


def meta_of(document: dict[str, Any]) -> dict[str, Any]:
    """What the job keeps beside tensors. Version 1 held only what JSON holds."""
    return dict(decode(document["meta"], "meta") if document["version"] > 1 else document["meta"])


def scalars_of(given: Any) -> dict[str, float | int]:
    """Numbers by name."""
    scalars = {str(key): value for key, value in given.items()}
    for key, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"the number {key!r} of the manifest is {value!r}")
    return scalars


def next_number(disk: Disk, root: Path) -> int:
    """One more than any checkpoint of a directory has."""
    return 1 + max((number for number, _ in numbered(disk, root)), default=0)


def numbered(disk: Disk, root: Path) -> list[tuple[int, str]]:
    """(number, tag) of the checkpoints of a directory, the newest last. Those of version 2 have 0.

    Other things in the directory, and what is damaged, do not count.
    """
    found = []
    for name in disk.names(root):
        if not tag_of(name) or not disk.is_directory(root / name):
            continue
        number = number_of(disk, root / name)
        if number is not None:
            found.append((number, name))
    return sorted(found)


def number_of(disk: Disk, path: Path) -> int | None:
    """Of the checkpoint in ``path``; None: there is none, or none that can be read."""
    with contextlib.suppress(CheckpointError):
        number = read_document(disk, path).get("number", 0)
        return number if type(number) is int else 0
    return None


def files_named(disk: Disk, path: Path) -> list[str]:
    """What the manifest in ``path`` names: its index, and the files of its ranks; none where there is no manifest that
    can be read."""
    with contextlib.suppress(CheckpointError):
        document = read_document(disk, path)
        if document["version"] >= INDEXED:
            manifest = manifest_of(document, MANIFEST)
            ranks = range(manifest.world_size)
            return [manifest.index, *(file_of(manifest.attempt, rank) for rank in ranks)]
        return [name for name in disk.names(path) if name.startswith("rank_") and name.endswith(".safetensors")]
    return []


def _attempt(value: object) -> str:
    if not isinstance(value, str) or not ATTEMPT.fullmatch(value):
        raise CheckpointError(f"the manifest has the attempt {value!r}; it is 16 hexadecimal digits")
    return value


def _size(what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise CheckpointError(f"the manifest says {what} = {value!r}")
    return value
