"""Old checkpoints are removed, the newest stay."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Any

from zoo.checkpointing import under_way
from zoo.checkpointing.disk import LOCAL, Disk, discard, place_of
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.exact import decode
from zoo.checkpointing.manifest import files_named, meta_of, numbered, read_document, scalars_of
from zoo.checkpointing.names import MANIFEST, is_ours, latest_tag

REST_AGE_S = 86400.0
"""After so long a save that has not ended is taken for one that was killed."""


def prune(
    directory: str | os.PathLike[str], keep: int, *, older_than_s: float = 0.0, best: str | None = None,
    rest_age_s: float = REST_AGE_S, disk: Disk | None = None,
) -> list[str]:  # fmt: skip
    """Remove all but the ``keep`` newest checkpoints of a directory; on one rank. Others may save there meanwhile.

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
    found = [(number, disk.modified_s(root / name / MANIFEST) or 0.0, name) for number, name in numbered(disk, root)]
    stays = {latest_tag(root, disk=disk)}
    if best is not None:
        stays.add(_best(disk, root, [name for _, _, name in sorted(found)], best))
    oldest_s = time.time() - older_than_s
    gone = [name for _, saved_s, name in sorted(found)[:-keep] if name not in stays and saved_s <= oldest_s]
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


def _remove_rest(disk: Disk, path: Path, age_s: float) -> None:
    """What an earlier call or a save has left that ended in the middle: files of ours, and no manifest."""
    if (disk is LOCAL and path.is_symlink()) or not disk.is_directory(path) or path.name.startswith("."):
        return
    names = disk.names(path)
    if MANIFEST in names or not names or not all(map(is_ours, names)):
        return
    changed = [found for name in names if (found := disk.modified_s(path / name)) is not None]
    if changed and time.time() - max(changed) < age_s:
        return
    for name in names:
        discard(disk, path / name)
    discard(disk, path)
