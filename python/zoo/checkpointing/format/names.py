"""Names: of slices inside a file, of files inside a checkpoint, of checkpoints inside a directory."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path

from zoo.checkpointing import under_way
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import Disk, place_of, read_file
from zoo.layout import StateSlice as StateSlice

MANIFEST = "manifest.json"
LATEST = "latest"
RANK_ROLE = "rank"
"""Role of tensors that belong to one rank and no logical tensor (random number generators)."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_FILE = re.compile(r"(rank_|[0-9a-f]{16}\.(constant\.)?)\d{5,}\.safetensors")
_INDEX = re.compile(r"[0-9a-f]{16}\.index")
ATTEMPT = re.compile(r"[0-9a-f]{16}")


def new_attempt() -> str:
    """What tells the files of one save from those of all others, of other jobs too."""
    return secrets.token_hex(8)


def file_of(attempt: str, rank: int) -> str:
    """The name of a rank's file."""
    return f"{attempt}.{rank:05d}.safetensors"


def constant_file_of(attempt: str, rank: int) -> str:
    """The name of a rank's file of what does not change."""
    return f"{attempt}.constant.{rank:05d}.safetensors"


def old_file_of(rank: int) -> str:
    """That in versions 1 and 2 of the format."""
    return f"rank_{rank:05d}.safetensors"


def index_of(attempt: str) -> str:
    """The name of the index."""
    return f"{attempt}.index"


def is_ours(name: str) -> bool:
    """Whether a save makes files of such names."""
    return bool(_FILE.fullmatch(name) or _INDEX.fullmatch(name))


def check_file(name: object) -> str:
    """``name`` if it is one that :func:`file_of` makes; an index can name nothing outside of its directory."""
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(
            f"the checkpoint names the file {name!r}; its files are called {file_of('0123456789abcdef', 0)} and so on"
        )
    return name


def check_index(name: object) -> str:
    """``name`` if it is one that :func:`index_of` makes."""
    if not isinstance(name, str) or not _INDEX.fullmatch(name):
        raise CheckpointError(f"the manifest names the index {name!r}; it is called {index_of('0123456789abcdef')}")
    return name


def check_tag(tag: object) -> str:
    """``tag`` if it can be the name of a directory of its own."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"the checkpoint tag {tag!r} cannot be used; a tag is letters, digits and any of _ . + = - (not first), "
            f"at most "
            f"200 of them, and not {LATEST!r}"
        )
    return tag


def key_of(role: str, name: str, start: int) -> str:
    """How a slice is called inside a file: ``role|name|start``. A role has no "|", a name may."""
    return f"{role}|{name}|{start}"


def parse_key(key: str) -> tuple[str, str, int]:
    """(role, name, start) of a key."""
    role, bar, rest = key.partition("|")
    name, second, start = rest.rpartition("|")
    if not bar or not second or not start.isdigit():
        raise CheckpointError(f"a file holds the key {key!r}; keys are written role|name|start")
    return role, name, int(start)


def replaced_of(directory: Path, tag: str) -> Path:
    """Where version 2 left a checkpoint while it was replaced."""
    return directory / f".replaced-{tag}"


def tag_of(name: str) -> bool:
    """Whether a directory of this name can be a checkpoint."""
    return bool(_TAG.fullmatch(name)) and name != LATEST


def tags_of(disk: Disk, directory: Path) -> list[str]:
    """The checkpoints of a directory: what has a manifest."""
    if not disk.is_directory(directory):
        return []
    found = [name for name in disk.names(directory) if tag_of(name) and disk.is_directory(directory / name)]
    return [name for name in found if MANIFEST in names_in(disk, directory / name)]


def names_in(disk: Disk, path: Path) -> list[str]:
    """What is in a directory; nothing where it may not be looked into, or has gone."""
    with contextlib.suppress(OSError):
        return disk.names(path)
    return []


def find(disk: Disk, directory: Path, tag: str) -> Path:
    """The directory of a committed checkpoint.

    Between two renames of a save of version 2 that replaces a checkpoint only the old one exists, under its waiting
    name.
    """
    for path in (directory / tag, replaced_of(directory, tag)):
        if disk.is_directory(path):
            return path
    known = ", ".join(tags_of(disk, directory)) or "none"
    raise CheckpointError(f"there is no checkpoint {tag!r} in {str(directory)!r}; it holds {known}")


def latest_tag(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> str | None:
    """The tag that ``<directory>/latest`` names, None when there is no such file.

    Raises:
        CheckpointError: the file holds something that is no tag.
    """
    disk, root = place_of(directory, disk)
    path = root / LATEST
    under_way.finish(root)
    try:
        content = read_file(disk, path, 1000)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from None
    try:
        return check_tag(content.decode("utf-8", "replace").strip())
    except CheckpointError as error:
        raise CheckpointError(f"{str(path)!r}: {error}") from None


def has_checkpoints(directory: str | os.PathLike[str]) -> bool:
    """Whether there is one to go on from: a machine that stopped may have left an empty ``latest``, or none.

    Raises:
        CheckpointError: there is none, and ``latest`` cannot be read.
    """
    tags = tags_of(*place_of(directory))
    return bool(tags) or latest_tag(directory) is not None
