"""Saves of this process that are under way: whoever reads a directory in the same process waits for those to it."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

_lock = threading.Lock()
_saves: dict[Path, list[Future[Any]]] = {}


def _forked() -> None:
    """A child has none of the threads that save, so it waits for none of their saves."""
    global _lock
    _lock = threading.Lock()
    _saves.clear()


os.register_at_fork(after_in_child=_forked)


def begin(root: Path, save: Future[Any]) -> None:
    """A save to this directory has begun."""
    root = _real(root)
    with _lock:
        _saves.setdefault(root, []).append(save)

    def over(save: Future[Any]) -> None:
        with _lock:
            left = [other for other in _saves.get(root, ()) if other is not save]
            if left:
                _saves[root] = left
            else:
                _saves.pop(root, None)

    save.add_done_callback(over)


def finish_all() -> None:
    """Return when no save of this process is under way."""
    with _lock:
        waiting = [save for saves in _saves.values() for save in saves]
    _wait(waiting)


def finish(directory: str | os.PathLike[str]) -> None:
    """Return when no save of this process to this directory is under way. What failed is told by whoever saved."""
    with _lock:
        waiting = list(_saves.get(_real(directory), ()))
    _wait(waiting)


def _real(directory: str | os.PathLike[str]) -> Path:
    """One directory may have several paths."""
    return Path(os.path.realpath(directory))


def _wait(saves: list[Future[Any]]) -> None:
    for save in saves:
        with contextlib.suppress(Exception):
            save.result()
