"""Old checkpoints are removed, the newest stay."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.checkpointing import under_way
from zoo.checkpointing.errors import CheckpointError
from zoo.checkpointing.format.disk import Disk, discard, place_of, write_file
from zoo.checkpointing.format.exact import decode
from zoo.checkpointing.format.manifest import (
    attempt_of,
    files_named,
    meta_of,
    number_of,
    numbered,
    read_document,
    scalars_of,
)
from zoo.checkpointing.format.names import MANIFEST, is_ours, latest_tag, names_in, new_attempt
from zoo.checkpointing.reading import load
from zoo.comm import Communicator

_log = logging.getLogger("zoo.checkpointing")

REST_AGE_S = 86400.0
"""After so long a save that has not ended is taken for one that was killed."""


def prune(
    directory: str | os.PathLike[str], keep: int, *, older_than_s: float = 0.0, best: str | None = None,
    rest_age_s: float = REST_AGE_S, dry_run: bool = False, disk: Disk | None = None,
) -> list[str]:  # fmt: skip
    """Remove the checkpoints of a directory that have at least ``keep`` newer ones; on one rank. Others may save there
    meanwhile: what they replace is not removed. So may others remove.

    Of the newer ones those count that can be opened whole, so that damage never costs what is older than it. Symbolic
    links are no checkpoints here: they do not count, and stay as they are.

    Ages are by the clock of the file system, from which the times of files come; that of this machine may be another.
    The one that ``latest`` names always stays. A manifest goes first: whatever ends this in the middle, what is left of
    a checkpoint is not taken for one. Other files, in the directory or beside a checkpoint, stay; what a killed save
    has left goes when nothing of it has changed for ``rest_age_s`` seconds.

    Args:
        older_than_s: of the others only those go that were saved so long ago.
        best: ``"min:<where>"`` or ``"max:<where>"``: the checkpoint with the smallest or largest number there stays,
            the newest of several. Where: keys of ``meta`` with dots between them (``min:client.loss``), or the name of
            a scalar. A Python number, or a tensor or a number of numpy of one element; the log names the checkpoints
            that have none. Only what can be opened whole is the best.
        dry_run: remove nothing.

    Returns:
        The tags of those that this call has removed; with ``dry_run`` of those that it would.

    Raises:
        ValueError: ``keep`` < 1, or a ``best`` that no checkpoint has.
    """
    if keep < 1:
        raise ValueError(f"prune(keep={keep}); at least the latest checkpoint is kept.")
    disk, root = place_of(directory, disk)
    under_way.finish(root)
    found = sorted(
        _Found(number, _saved_s(disk, root / name), name, attempt_of(disk, root / name))
        for number, name in numbered(disk, root)
        if not disk.is_link(root / name)
    )
    stays = {_latest(disk, root)}
    if best is not None:
        stays.add(_best(disk, root, [one.name for one in found], best))
    old = [one for one in _old(disk, root, found, keep) if one.name not in stays]
    if older_than_s > 0 and old:
        oldest_s = _now_s(disk, root) - older_than_s
        old = [one for one in old if one.saved_s <= oldest_s]
    if dry_run:
        return [one.name for one in old]
    gone = [one.name for one in old if _remove(disk, root, one)]
    _remove_rests(disk, root, rest_age_s)
    return gone


@dataclass(frozen=True, order=True)
class _Found:
    """A checkpoint when its manifest was read. The time orders those of version 2, which have no numbers."""

    number: int
    saved_s: float
    name: str
    attempt: str | None


def _old(disk: Disk, root: Path, found: list[_Found], keep: int) -> list[_Found]:
    """Those that have ``keep`` newer ones that can be opened whole."""
    if len(found) <= keep:
        return []
    num_whole = 0
    for place in reversed(range(len(found))):
        num_whole += _is_whole(disk, root, found[place].name)
        if num_whole == keep:
            return found[:place]
    return []


def _is_whole(disk: Disk, root: Path, name: str) -> bool:
    try:
        load(root, name, Communicator.alone(), verify=False, disk=disk).close()
    except CheckpointError as error:
        _log.warning("the checkpoint %r does not count as one that is kept: %s", name, error)
        return False
    return True


def _latest(disk: Disk, root: Path) -> str | None:
    """The checkpoint that ``latest`` names, through a link too."""
    tag = latest_tag(root, disk=disk)
    return Path(os.path.realpath(root / tag)).name if tag is not None and disk.is_link(root / tag) else tag


def _remove(disk: Disk, root: Path, one: _Found) -> bool:
    """Remove a checkpoint, unless it is another one by now, or the latest, or gone."""
    path = root / one.name
    if (number_of(disk, path), attempt_of(disk, path)) != (one.number, one.attempt) or _latest(disk, root) == one.name:
        return False
    files = files_named(disk, path)
    try:
        disk.remove(path / MANIFEST)
    except FileNotFoundError:
        return False
    with contextlib.suppress(FileNotFoundError):  # whoever else removes it has done so
        disk.sync_directory(path)
    for file in files:
        discard(disk, path / file)
    discard(disk, path)
    return True


def _best(disk: Disk, root: Path, names: list[str], best: str) -> str | None:
    """The name of the checkpoint with the best number that is whole; ``names``: the newest last."""
    kind, _, where = best.partition(":")
    if kind not in ("min", "max") or not where:
        raise ValueError(f"best={best!r}; it is min: or max: and where the number is, such as 'min:client.loss'.")
    numbers: list[tuple[float, str]] = []
    without: list[str] = []
    for name in reversed(names):
        number = None
        with contextlib.suppress(CheckpointError):
            number = _number_at(read_document(disk, root / name), where)
        if number is None:
            without.insert(0, name)
        else:
            numbers.append((number if kind == "min" else -number, name))
    if names and not numbers:
        raise ValueError(f"best={best!r}; no checkpoint of {str(root)!r} has a number there.")
    if without:
        _log.warning("best=%r: these have no number there, and do not count: %s", best, ", ".join(without))
    ordered = sorted(numbers, key=lambda pair: pair[0])  # which keeps the newest of several first
    return next((name for _, name in ordered if _is_whole(disk, root, name)), None)


def _number_at(document: dict[str, Any], where: str) -> float | None:
    """An int stays one: it may be larger than any float."""
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
    if (isinstance(found, torch.Tensor) and found.numel() == 1) or (
        isinstance(found, (np.ndarray, np.generic)) and found.size == 1
    ):
        found = found.item()
    if isinstance(found, float):
        return None if math.isnan(found) else found
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _saved_s(disk: Disk, path: Path) -> float:
    """When it was saved."""
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
        if disk.is_link(path) or not disk.is_directory(path):
            continue
        names = names_in(disk, path)
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
