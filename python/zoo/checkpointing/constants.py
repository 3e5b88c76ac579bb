"""What does not change from one checkpoint to the next (the frozen parameters of a model) is written once.

It is in a file of its own. The next checkpoint of the same directory gives that file a second name, in its own
directory, where every block still has the checksum that it had: then a checkpoint stays whole by itself, and prune
frees the bytes with the last name. Where a file system has no second names, or anything has changed, it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zoo.checkpointing.format.data_files import Written, sums_of, write_data
from zoo.checkpointing.format.disk import Disk
from zoo.checkpointing.format.tensors import Entry


@dataclass(frozen=True)
class _Known:
    path: Path
    disk: Disk
    entries: tuple[tuple[str, torch.dtype, int], ...]
    written: Written


class Constants:
    """The file of constants that this rank has written last, by whoever saves again and again."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def put(self, disk: Disk, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Written:
        """The file ``path`` with these tensors: the last one under another name, or a new one. Its bytes are forced to
        the device; its name is for the caller to force.

        Raises:
            CheckpointError, OSError: as :func:`zoo.checkpointing.format.data_files.write_data` does.
        """
        described = tuple((entry.key, entry.dtype, entry.length) for entry in entries)
        known = self._known
        same_place = known is not None and (known.path.parent.parent, known.disk) == (path.parent.parent, disk)
        if known is not None and same_place and known.entries == described:
            unchanged = np.array_equal(sums_of(entries, metadata), known.written.sums)
            if unchanged and _named(disk, known.path, path, known.written.size):
                self._known = _Known(path, disk, described, known.written)
                return known.written
        written = write_data(disk, path, entries, metadata)
        self._known = _Known(path, disk, described, written)
        return written


def _named(disk: Disk, known: Path, path: Path, size: int) -> bool:
    """Whether the file has got its second name, and is as long as it was."""
    try:
        if not disk.link(known, path):
            return False
        source = disk.open(path)
    except OSError:  # it was pruned, or there can be no more names
        return False
    try:
        if source.size() == size:
            return True
    finally:
        source.close()
    disk.remove(path)
    return False
