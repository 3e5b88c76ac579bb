"""Files on this machine's file system that are whole once they have their names."""

from __future__ import annotations

import os
from pathlib import Path

from zoo.checkpointing.format.disk import LOCAL, make_directories, put


def sync(folder: Path) -> None:
    """Force a folder's entries to the disk."""
    LOCAL.sync_directory(absolute(folder))


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; their entries survive a loss of power too."""
    make_directories(LOCAL, absolute(path))


def replace(path: Path, content: bytes) -> None:
    """Put a file there: readers see what was there before, or this."""
    put(LOCAL, absolute(path), content)


def absolute(path: Path) -> Path:
    """The path from the root, links as they are."""
    return Path(os.path.abspath(path))
