"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, text: str) -> None:
    """Write a text to a file beside ``path``, which then takes its name: a process killed meanwhile leaves what
    was there.

    A link stays one: what it points to is replaced. What is no regular file, such as a pipe, is written to.

    Raises:
        OSError: there is no such folder, no space, or no right to write.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        place.write_text(text, encoding="utf-8")
        return
    mode = place.stat().st_mode & 0o7777 if place.exists() else None
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name[:200]}.", suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask() if mode is None else mode)
        os.replace(name, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found
