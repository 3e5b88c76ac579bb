"""Servers in the foreground that belong to a folder: their process numbers and what they print are files in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def find(name: str) -> str | None:
    """The path of a program, also of one that only root has on its path."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")


def do(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        RuntimeError: it fails.
    """
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
    if told.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {(told.stderr or told.stdout).strip()}")
    return told.stdout


def done(*command: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether a command succeeds."""
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        do(*command, environment=environment)
        return True
    return False


def start(
    folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, called: str = ""
) -> None:  # fmt: skip
    """Start a server that stays in the foreground; ``called`` tells several of a name apart."""
    program = find(name)
    if program is None:
        raise RuntimeError(f"there is no program {name}.")
    called = called or name
    with (folder / f"{called}.log").open("ab") as log:
        process = subprocess.Popen(
            [program, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=environment,
        )  # fmt: skip
    (folder / f"{called}.started").write_text(str(process.pid))


def wait(comes: Callable[[], bool], folder: Path, what: str, timeout_s: float = 60.0) -> None:
    """Until it is there.

    Raises:
        RuntimeError: it is not; with what the servers said last.
    """
    until = time.monotonic() + timeout_s
    while not comes():
        if time.monotonic() > until:
            logs = "".join(f"\n{file.name}: {file.read_text()[-2000:]}" for file in sorted(folder.glob("*.log")))
            raise RuntimeError(f"{what} does not come up.{logs}")
        time.sleep(0.1)


def stop(folder: Path) -> None:
    """End all that were started for a folder, the last first: SIGTERM, and SIGKILL after five seconds."""
    files = sorted(folder.glob("*.started"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        pid = int(file.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + 5
            while time.monotonic() < until and _lives(pid):
                time.sleep(0.05)
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)
        file.unlink()


def _lives(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
