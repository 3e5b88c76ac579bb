"""The journal of a search: one JSON object a line, on disk before anything else happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["Journal", "JournalError", "put_aside", "read", "refuse_begun"]

NAME = "journal.jsonl"


class JournalError(ValueError):
    """A directory that cannot be a search's."""


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a journal; a last line that a crash has cut is left out.

    Raises:
        JournalError: there is none, or a line before the last is no event.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise JournalError(
            f"{str(path.parent)!r} has no {NAME}; name the directory of a search that zoo tune has begun."
        ) from None
    except OSError as error:
        raise JournalError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    events = []
    *lines, torn = data.split(b"\n")  # a whole last line ends, and leaves nothing behind it
    del torn
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise JournalError(f"line {number} of {str(path)!r} is no event of a search; the file was changed.")
        events.append(event)
    return events


def refuse_begun(folder: Path) -> None:
    """Refuse a folder in which a search has begun; one that is not there is new.

    Raises:
        JournalError: a search is there, or something that is no journal.
    """
    if os.path.exists(folder / NAME) and read(folder / NAME):
        raise JournalError(
            f"there is a search in {str(folder)!r} already. Go on with it (--resume {folder}), or choose another "
            'directory (--out); "autotuning": {"overwrite": true} puts it aside.'
        )


def put_aside(folder: Path) -> None:
    """An old journal gets a number; it is not lost.

    Raises:
        JournalError: another process is searching there, or the directory cannot be written to.
    """
    path, number = folder / NAME, 1
    while (aside := path.with_name(f"journal-{number}.jsonl")).exists():
        number += 1
    try:
        with open(path, "rb") as file:
            _lock(file, folder)
            path.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise JournalError(f"{str(folder)!r} cannot be written to: {error.strerror}; choose another --out.") from None


def _lock(file: IO[bytes], folder: Path) -> None:
    """Hold the search of a folder as long as the file is open."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise JournalError(f"another process is searching in {str(folder)!r}; wait for it.") from None


class Journal:
    """Appends events to ``folder/journal.jsonl``; each is on the disk when :meth:`write` returns.

    One search at a time has it: a second one is refused. Use it as a context.

    Args:
        folder: made if it is not there.
        resumes: go on after the events that are there; otherwise there must be none.

    Attributes:
        events: all of them, those that were there first.

    Raises:
        JournalError: a search is there and it is not to be resumed, none is there to resume, another process has it,
            or the directory cannot be written to.
    """

    def __init__(self, folder: Path, *, resumes: bool = False) -> None:
        self.path = folder / NAME
        self.events: list[dict[str, Any]] = []
        if resumes:
            read(self.path)  # before anything is made
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: FileIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise JournalError(
                f"{str(folder)!r} cannot be written to: {error.strerror}; choose another --out."
            ) from None
        try:
            _lock(self._file, folder)
            self._open(folder, resumes)
        except BaseException:
            self._file.close()
            raise

    def _open(self, folder: Path, resumes: bool) -> None:
        self.events = read(self.path)
        if not resumes:
            refuse_begun(folder)
        text = self.path.read_bytes()
        self._file.truncate(text.rfind(b"\n") + 1)  # what a crash left of a line
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)  # the file's name, too
        finally:
            os.close(directory)

    def write(self, event: str, **values: Any) -> None:
        """Append one event.

        Raises:
            JournalError: it cannot be written; nothing of it is in the file then.
        """
        line: Mapping[str, Any] = {"event": event, **values}
        rest = memoryview(json.dumps(line).encode() + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)  # a line after a torn one would spoil both
            raise JournalError(
                f"{str(self.path)!r} cannot be written to: {error.strerror}; make room, and go on with --resume "
                f"{self.path.parent}."
            ) from error
        self.events.append(dict(line))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
