"""Old checkpoints are removed, the newest stay."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

from zoo.checkpointing import under_way
from zoo.checkpointing.disk import LOCAL, Disk, discard, place_of, write_file
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.exact import decode
from zoo.checkpointing.manifest import files_named, meta_of, number_of, numbered, read_document, scalars_of
from zoo.checkpointing.names import MANIFEST, is_ours, latest_tag, new_attempt

REST_AGE_S = 86400.0
"""After so long a save that has not ended is taken for one that was killed."""


def prune(
    directory: str | os.PathLike[str], keep: int, *, older_than_s: float = 0.0, best: str | None = None,
    rest_age_s: float = REST_AGE_S, disk: Disk | None = None,
) -> list[str]:  # fmt: skip
    """Remove all but the ``keep`` newest checkpoints of a directory; on one rank. Others may save there meanwhile: what
    they replace is not removed.

    Ages are by the clock of the file system, from which the times of files come; that of this machine may be another.
    The one that ``latest`` names always stays. A manifest goes first: whatever ends this in the middle, what is left of
    a checkpoint is not taken for one. Other files, in the directory or beside a checkpoint, stay; what a killed save
    has left goes when nothing of it has changed for ``rest_age_s`` seconds.

    Args:
        older_than_s: of the others only those go that were saved so long ago.
        best: ``"min:<where>"`` or ``"max:<where>"``: the checkpoint with the smallest or largest number there stays,
            the newest of several. Where: keys of ``meta`` with dots between them (``min:client.loss``), or the name of
            a scalar.

    Returns:
        The tags of those that are gone.

    Raises:
        ValueError: ``keep`` < 1, or a ``best`` that no checkpoint has.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}); at least the latest checkpoint is kept.")
    disk, root = place_of(directory, disk)
    under_way.finish(root)
    found = [(number, _saved_s(disk, root / name), name) for number, name in numbered(disk, root)]
    stays = {latest_tag(root, disk=disk)}
    if best is not None:
        stays.add(_best(disk, root, [name for _, _, name in sorted(found)], best))
    old = [(number, saved_s, name) for number, saved_s, name in sorted(found)[:-keep] if name not in stays]
    if older_than_s > 0 and old:
        oldest_s = _now_s(disk, root) - older_than_s
        old = [(number, saved_s, name) for number, saved_s, name in old if saved_s <= oldest_s]
    gone = [name for number, _, name in old if _remove(disk, root / name, number)]
    _remove_rests(disk, root, rest_age_s)
    return gone


def _remove(disk: Disk, path: Path, number: int) -> bool:
    """Remove a checkpoint, unless it was replaced since it had this number."""
    if number_of(disk, path) != number:
        return False
    files = files_named(disk, path)
    disk.remove(path / MANIFEST)
    disk.sync_directory(path)
    for file in files:
        discard(disk, path / file)
    discard(disk, path)
    return True


def _best(disk: Disk, root: Path, names: list[str], best: str) -> str | None:
    """The name of the checkpoint with the best number; ``names``: the newest last."""
    kind, _, where = best.partition(":")
    if kind not in ("min", "max") or not where:
        raise ValueError(f"best={best!r}; it is min: or max: and where the number is, such as 'min:client.loss'.")
    numbers: list[tuple[float, str]] = []
    for name in reversed(names):
        with contextlib.suppress(CheckpointError):
            number = _number_at(read_document(disk, root / name), where)
            if number is not None:
                numbers.append((number if kind == "min" else -number, name))
    if names and not numbers:
        raise ValueError(f"best={best!r}; no checkpoint of {str(root)!r} has a number there.")
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def _number_at(document: dict[str, Any], where: str) -> float | None:
    try:
        found: Any = meta_of(document)
        scalars = scalars_of(decode(document["scalars"], "scalars"))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    if where in scalars:
        found = scalars[where]
    else:
        for key in where.split("."):
            found = found.get(key) if isinstance(found, dict) else None
    known = isinstance(found, (int, float)) and not isinstance(found, bool) and not math.isnan(found)
    return float(found) if known else None


def _saved_s(disk: Disk, path: Path) -> float:
    """When it was saved. That orders checkpoints of version 2, which have no numbers."""
    return disk.modified_s(path / MANIFEST) or 0.0


def _now_s(disk: Disk, root: Path) -> float:
    """By the clock of the file system: that of a new file."""
    path = root / f".clock.{new_attempt()}"
    try:
        write_file(disk, path, b"")
        found = disk.modified_s(path)
    finally:
        discard(disk, path)
    return time.time() if found is None else found


def _remove_rests(disk: Disk, root: Path, age_s: float) -> None:
    """What an earlier call or a save has left that ended in the middle: files of ours, and no manifest."""
    rests: list[tuple[Path, list[str], float]] = []
    for path in (root / name for name in disk.names(root) if not name.startswith(".")):
        if (disk is LOCAL and path.is_symlink()) or not disk.is_directory(path):
            continue
        names = disk.names(path)
        if MANIFEST in names or not names or not all(map(is_ours, names)):
            continue
        changed = [found for name in names if (found := disk.modified_s(path / name)) is not None]
        if len(changed) == len(names):  # otherwise a file has gone meanwhile: somebody is at work there
            rests.append((path, names, max(changed)))
    now_s = _now_s(disk, root) if rests else 0.0
    for path, names, changed_s in rests:
        if now_s - changed_s >= age_s:
            for name in names:
                discard(disk, path / name)
            discard(disk, path)
