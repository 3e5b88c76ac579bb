"""The manifest: parsed and checked by hand, because it comes from outside. Its appearance is the checkpoint.

Since version 3: the name, size and SHA-256 of the index, the numbers, what the job keeps beside tensors, and the
SHA-256 of all that. Versions 1 and 2 had the tensors and files in it (:mod:`zoo.checkpointing.format.version2`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.checkpointing.errors import CheckpointError, UnreadableError
from zoo.checkpointing.format.disk import Disk, read_beginning, read_file
from zoo.checkpointing.format.exact import decode
from zoo.checkpointing.format.names import (
    ATTEMPT,
    MANIFEST,
    check_index,
    constant_file_of,
    file_of,
    index_of,
    names_in,
    tag_of,
)

FORMAT = "zoo-checkpoint"
VERSION = 4
READABLE = (1, 2, 3, 4)
"""Versions that are read. 2: ``meta`` as ``exact.py`` writes it. 3: an index beside it. 4: boxes in it."""
INDEXED = 3
"""The first version with an index."""
SUM = "sha256"
"""Key of the manifest's own checksum; where there is none, as in older ones, nothing is compared."""
MOST_BYTES = 1 << 30
MOST_META_BYTES = 1 << 28
"""Of ``meta`` in a manifest that is written, so that the whole of it stays well below what is read."""
_HEAD_BYTES = 4096
_HEAD_ENDS = b',\n "scalars": '
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_NO_FILE = {errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO}
"""Of what is no plain file: a link, a pipe, a directory, a socket."""
_MOST_RANKS = 1 << 24
_END = 1 << 62
"""Numbers and sizes are smaller."""


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
        UnreadableError: it may not be read, or the disk refuses.
    """
    return parse(text_of(disk, path), str(path / MANIFEST))


def text_of(disk: Disk, path: Path) -> bytes:
    """The manifest in the directory ``path``; raises as :func:`read_document` does."""
    with _told(path):
        return read_file(disk, path / MANIFEST, MOST_BYTES)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What reading the manifest raises, as a CheckpointError."""
    file = str(path / MANIFEST)
    try:
        yield
    except _NOT_THERE:
        raise CheckpointError(
            f"{str(path)!r} has no {MANIFEST}: it is not a checkpoint, or one that was never finished"
        ) from None
    except OSError as error:
        kind = CheckpointError if error.errno in _NO_FILE else UnreadableError
        raise kind(f"{file!r} cannot be read: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file!r} cannot be read: {error}") from None


def head_of(disk: Disk, path: Path) -> dict[str, Any]:
    """What the manifest in ``path`` says before its numbers and ``meta``, which may be long and are not read; all of it
    where these do not come last. Its checksum is not compared.

    Raises:
        CheckpointError: as :func:`read_document`.
    """
    with _told(path):
        begin = read_beginning(disk, path / MANIFEST, _HEAD_BYTES)
    # Strings of JSON have no line breaks: this is between two entries.
    end = begin.find(_HEAD_ENDS)
    if end >= 0:
        with contextlib.suppress(CheckpointError):
            return parse(begin[:end] + b"}", str(path / MANIFEST))
    return read_document(disk, path)


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


def written(document: Mapping[str, Any]) -> bytes:
    """As a file: an entry a line, and ``meta``, whose size is known, in one."""
    meta = json.dumps(document["meta"], allow_nan=False)
    rest = {key: value for key, value in document.items() if key != "meta"}
    own = {SUM: rest.pop(SUM)}
    text = f'{json.dumps(rest, indent=1)[:-2]},\n "meta": {meta},\n{json.dumps(own, indent=1)[2:]}'.encode()
    if len(text) > MOST_BYTES:
        raise CheckpointError(f"the manifest would have {len(text):,} bytes, and {MOST_BYTES:,} are read")
    return text


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
    size = _size("world_size", document.get("world_size"))
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
    """One more than any checkpoint of a directory has.

    Raises:
        CheckpointError: there is none that a manifest may have.
    """
    number, tag = max(numbered(disk, root), default=(0, ""))
    if number + 1 >= _END:
        raise CheckpointError(
            f"the checkpoint {tag!r} of {str(root)!r} has the number {number}, after which there is none; move it away"
        )
    return number + 1


def numbered(disk: Disk, root: Path, unreadable: list[str] | None = None) -> list[tuple[int, str]]:
    """(number, tag) of the checkpoints of a directory, the newest last. Those of version 2 have 0.

    Other things in the directory, and what is damaged, do not count. Of manifests that are there and may not be read
    ``unreadable`` gets the sentences.
    """
    found = []
    for name in disk.names(root):
        if not tag_of(name) or not disk.is_directory(root / name):
            continue
        try:
            found.append((head_number(head_of(disk, root / name)), name))
        except UnreadableError as error:
            if unreadable is not None and MANIFEST in names_in(disk, root / name):
                unreadable.append(str(error))
        except CheckpointError:
            continue
    return sorted(found)


def head_number(head: dict[str, Any]) -> int:
    """The number in what :func:`head_of` gives; raises CheckpointError for a manifest that no load takes."""
    if head["version"] < INDEXED:
        return 0
    try:
        _attempt(head["attempt"])
        return _size("number", head["number"])
    except KeyError as error:
        raise CheckpointError(f"the manifest has no {error}") from None


def number_of(disk: Disk, path: Path) -> int | None:
    """Of the checkpoint in ``path``; None: there is none, or none that can be read."""
    with contextlib.suppress(CheckpointError):
        return head_number(head_of(disk, path))
    return None


def attempt_of(disk: Disk, path: Path) -> str | None:
    """Which save has written the checkpoint in ``path``; None: version 2, or none that can be read."""
    with contextlib.suppress(CheckpointError):
        attempt = head_of(disk, path).get("attempt")
        return attempt if isinstance(attempt, str) else None
    return None


def files_named(disk: Disk, path: Path) -> list[str]:
    """What the manifest in ``path`` names: its index, and the files of its ranks; none where there is no manifest that
    can be read."""
    with contextlib.suppress(CheckpointError, OSError):
        head = head_of(disk, path)
        if head["version"] >= INDEXED:
            attempt, ranks = _attempt(head.get("attempt")), range(world_size_of(head))
            names = (name(attempt, rank) for rank in ranks for name in (file_of, constant_file_of))
            return [index_of(attempt), *names]
        return [name for name in disk.names(path) if name.startswith("rank_") and name.endswith(".safetensors")]
    return []


def _attempt(value: object) -> str:
    if not isinstance(value, str) or not ATTEMPT.fullmatch(value):
        raise CheckpointError(f"the manifest has the attempt {value!r}; it is 16 hexadecimal digits")
    return value


def _size(what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < _END:
        raise CheckpointError(f"the manifest says {what} = {value!r}")
    return value
