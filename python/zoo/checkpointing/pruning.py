"""Old checkpoints are removed, the newest stay."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from zoo.checkpointing import under_way
from zoo.checkpointing.disk import LOCAL, Disk, discard
from zoo.checkpointing.manifest import files_named, numbered
from zoo.checkpointing.names import MANIFEST, is_ours, latest_tag

REST_AGE_S = 86400.0
"""After so long a save that has not ended is taken for one that was killed."""


def prune(
    directory: str | os.PathLike[str], keep: int, *, rest_age_s: float = REST_AGE_S, disk: Disk = LOCAL
) -> list[str]:  # fmt: skip
    """Remove all but the ``keep`` newest checkpoints of a directory; on one rank. Others may save there meanwhile.

    The one that ``latest`` names always stays. A manifest goes first: whatever ends this in the middle, what is left of
    a checkpoint is not taken for one. Other files, in the directory or beside a checkpoint, stay; what a killed save
    has left goes when nothing of it has changed for ``rest_age_s`` seconds.

    Returns:
        The tags of those that are gone.

    Raises:
        ValueError: ``keep`` < 1.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}); at least the latest checkpoint is kept.")
    root = Path(os.path.abspath(directory))
    under_way.finish(root)
    found = [(number, _age(root / name), name) for number, name in numbered(disk, root)]
    latest = latest_tag(root, disk=disk)
    gone = [name for _, _, name in sorted(found)[:-keep] if name != latest]
    for name in gone:
        files = files_named(disk, root / name)
        disk.remove(root / name / MANIFEST)
        disk.sync_directory(root / name)
        for file in files:
            discard(disk, root / name / file)
        discard(disk, root / name)
    for name in disk.names(root):
        _remove_rest(disk, root / name, rest_age_s)
    return gone


def _age(path: Path) -> int:
    """Of version 2, which has no numbers."""
    with contextlib.suppress(OSError):
        return (path / MANIFEST).stat().st_mtime_ns
    return 0


def _remove_rest(disk: Disk, path: Path, age_s: float) -> None:
    """What an earlier call or a save has left that ended in the middle: files of ours, and no manifest."""
    if path.is_symlink() or not disk.is_directory(path) or path.name.startswith("."):
        return
    names = disk.names(path)
    if MANIFEST in names or not names or not all(map(is_ours, names)):
        return
    with contextlib.suppress(OSError):
        if time.time() - max((path / name).stat().st_mtime for name in names) < age_s:
            return
    for name in names:
        discard(disk, path / name)
    discard(disk, path)
