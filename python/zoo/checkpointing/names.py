"""Names: of slices inside a file, of files inside a checkpoint, of checkpoints inside a directory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

import torch

from zoo.checkpointing.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")
_FILE = re.compile(r"rank_\d{5,}\.safetensors")


class StateSlice(Protocol):
    """Elements [start, start + length) of the row-major logical tensor ``name`` of shape ``shape``, in one ``role``.

    ``tensor`` is their (length,) flat view on this rank. Any object with these attributes will do; one that has a
    ``dtype`` as well is asked for its tensor only once, when it is written, so that it may load it then.
    """

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def tensor(self) -> torch.Tensor: ...


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def is_rank_file(name: str) -> bool:
    """Whether :func:`file_of` makes such names."""
    return bool(_FILE.fullmatch(name))


def check_file(name: object) -> str:
    """``name`` if it is one that :func:`file_of` makes; a manifest can name nothing outside of its directory."""
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(
            f"the manifest names the file {name!r}; files of a checkpoint are called {file_of(0)} and so on"
        )
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


def temporary_of(directory: Path, tag: str) -> Path:
    """Where a checkpoint is written before it counts."""
    return directory / f".writing-{tag}"


def replaced_of(directory: Path, tag: str) -> Path:
    """Where the checkpoint that a new one of the same tag replaces waits until that one counts."""
    return directory / f".replaced-{tag}"


def find(directory: Path, tag: str) -> Path:
    """The directory of a committed checkpoint.

    Between two renames of a save that replaces a checkpoint only the old one exists, under its waiting name.
    """
    for path in (directory / tag, replaced_of(directory, tag)):
        if path.is_dir():
            return path
    known = sorted(p.parent.name for p in directory.glob(f"*/{MANIFEST}") if not p.parent.name.startswith("."))
    raise CheckpointError(
        f"there is no checkpoint {tag!r} in {str(directory)!r}; it holds {', '.join(known) if known else 'none'}"
    )


def latest_tag(directory: str | os.PathLike[str]) -> str | None:
    """The tag that ``<directory>/latest`` names, None when there is no such file.

    Raises:
        CheckpointError: the file holds something that is no tag.
    """
    path = Path(directory) / LATEST
    if not path.is_file():
        return None
    return check_tag(path.read_text(encoding="utf-8").strip())
