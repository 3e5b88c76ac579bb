"""Folders and files of the sinks that write to disk."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import stat
from pathlib import Path
from types import ModuleType

from zoo.monitor.section import FolderSection
from zoo.parts import Environment

__all__ = ["AppendedFile", "open_folder", "package", "reason", "tell_if_shared"]

_log = logging.getLogger("zoo.monitor")
_PROBE = b"zoo writes here\n" * 256


def package(name: str, section: str, extra: str) -> ModuleType:
    """Import what a sink is made for.

    Raises:
        ValueError: it is not installed, or cannot be imported; the sentence names the extra that brings it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        wanted = name.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and (error.name or wanted).partition(".")[0] == wanted
        what = "is not installed" if absent else f"cannot be imported ({error})"
        raise ValueError(
            f'{section}: the package {wanted} {what}; `pip install "zoo-core[{extra}]"` brings it, or set '
            f"{section}.enabled to false."
        ) from error


def reason(error: Exception) -> str:
    """What an error says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def open_folder(name: str, section: FolderSection, environment: Environment) -> Path:
    """``<output_path>/<job_name>``, with ``/rank_<n>`` where all ranks write; made if need be, and tried. Absolute: the
    script may go elsewhere later.

    Raises:
        ValueError: files cannot be written there: no permission, no space, or there is something that is no folder.
    """
    try:
        folder = Path(section.output_path).expanduser().absolute() / section.job_name
    except RuntimeError as error:
        raise ValueError(
            f"{name}.output_path = {section.output_path!r}: {error}; give the folder's whole path."
        ) from None
    if section.ranks == "all":
        folder /= f"rank_{environment.rank}"
    probe = folder / f".writable_{os.getpid()}_{environment.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with AppendedFile(probe) as file:
                file.write(_PROBE)
                file.sync()
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
    except OSError as error:
        raise ValueError(
            f"{name}: cannot write into {folder} ({error.strerror or error}); choose another "
            f"{name}.output_path or {name}.job_name, or make this one writable."
        ) from error
    return folder


def tell_if_shared(name: str, file: AppendedFile) -> bool:
    """Say so where another sink, of this process or another, is writing into the same file; whether it is so."""
    if file.is_shared:
        _log.warning(
            "%s: %s is being written by another engine or job as well, and what they write mixes there; give each of "
            "them a %s.job_name of its own.", name, file.path, name,
        )  # fmt: skip
    return file.is_shared


class AppendedFile:
    """A file that grows by whole lines, each handed to the operating system at once.

    A killed process loses at most the line that is being written; a machine that stops, what its file system has not
    written yet (seconds). A line that was cut is removed when the file is opened again.

    Args:
        path: made if it is not there, continued if it is.
        begins: what a file with something in it has to begin with.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it begins otherwise: it is not ours to continue.

    Attributes:
        path: of the file. is_new: nothing was in it. is_shared: another one has it open.
    """

    def __init__(self, path: Path, begins: bytes = b"") -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self.is_shared = not self._locked()
            self.is_new = not stat.S_ISREG(os.fstat(self._file).st_mode) or self._repaired(path, begins) == 0
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AppendedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, lines: bytes) -> None:
        """Append whole lines. There is no buffer: what raises leaves nothing behind that is tried again later."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def sync(self) -> None:
        """Wait until it is on the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Closing twice does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process has ended
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def _repaired(self, path: Path, begins: bytes) -> int:
        """Remove a line without end, unless somebody else may be writing it; the size that remains."""
        size = os.fstat(self._file).st_size
        found = os.pread(self._file, len(begins), 0)
        if not begins.startswith(found):
            raise ValueError(f"{path} is there and does not begin with {begins.decode()!r}: it is not continued")
        if self.is_shared:
            return size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            line_end = os.pread(self._file, end - start, start).rfind(b"\n")
            if line_end >= 0:
                end = start + line_end + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._file, end)
        return end
