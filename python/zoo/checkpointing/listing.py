"""What checkpoints a directory holds, and whether they can be opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from zoo.checkpointing.errors import CheckpointError, UnreadableError
from zoo.checkpointing.format.disk import Disk, place_of
from zoo.checkpointing.format.manifest import number_of
from zoo.checkpointing.format.names import MANIFEST, is_ours, latest_tag, names_in, tag_of
from zoo.checkpointing.reading import load
from zoo.comm import Communicator

WHOLE, DAMAGED, UNREADABLE, UNFINISHED = "whole", "damaged", "unreadable", "unfinished"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint. ``state``: whole: its manifest, index and sizes of files fit each other (bytes are not read);
    damaged: they do not, and ``why``; unreadable: some of it may not be read; unfinished: files of a save that has not
    ended, or never will.

    ``saved_s``: of the manifest, seconds since 1970. Of what is not whole, numbers are None, but for ``number`` where
    the manifest says it.
    """

    tag: str
    state: str
    is_latest: bool = False
    version: int | None = None
    number: int | None = None
    saved_s: float | None = None
    num_bytes: int | None = None
    num_ranks: int | None = None
    num_tensors: int | None = None
    why: str = ""


def listing(directory: str | os.PathLike[str], *, disk: Disk | None = None) -> list[Listed]:
    """The checkpoints of a directory, the newest last, and before them what has no number that can be read. Other
    things in it do not count, nor folders that may not be looked into.

    Raises:
        CheckpointError: there is no such directory, or it is a checkpoint itself.
    """
    disk, root = place_of(directory, disk)
    if not disk.is_directory(root):
        raise CheckpointError(f"there is no directory {str(root)!r}")
    try:
        latest = latest_tag(root, disk=disk)
    except CheckpointError:
        latest = None
    found = []
    for name in disk.names(root):
        if tag_of(name) and disk.is_directory(root / name):
            names = names_in(disk, root / name)
            if MANIFEST in names:
                found.append(_listed(disk, root, name, name == latest))
            elif names and any(map(is_ours, names)):
                found.append(Listed(tag=name, state=UNFINISHED, why=f"has no {MANIFEST}"))
    if not found and MANIFEST in names_in(disk, root):
        raise CheckpointError(
            f"{str(root)!r} is a checkpoint itself; give the folder that it is in, {str(root.parent)!r}"
        )
    return sorted(found, key=lambda one: (one.number or 0, one.saved_s or 0.0, one.tag))


def _listed(disk: Disk, root: Path, tag: str, is_latest: bool) -> Listed:
    when = disk.modified_s(root / tag / MANIFEST)
    try:
        with load(root, tag, Communicator.alone(), verify=False, disk=disk) as found:
            return Listed(
                tag=tag, state=WHOLE, is_latest=is_latest, version=found.version, number=number_of(disk, found.path),
                saved_s=when, num_bytes=sum(entry.size for entry in found.index.files), num_ranks=found.world_size,
                num_tensors=len(found.shapes),
            )  # fmt: skip
    except CheckpointError as error:
        state = UNREADABLE if isinstance(error.__cause__, UnreadableError) else DAMAGED
        number = number_of(disk, root / tag)
        return Listed(tag=tag, state=state, is_latest=is_latest, number=number, saved_s=when, why=str(error))
