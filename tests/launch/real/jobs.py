"""Jobs that real launchers start, what they print, and whether anything of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.launch.jobs import alive, basics, new_mark

from zoo.deepspeed import installed_folder

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("program.py")
KINDS = ("engine", "facade")
TIMEOUT_S = 400
ZOO = [sys.executable, "-m", "zoo.cli"]
_OF_LAUNCHERS = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "ACCELERATE",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "NODE_RANK",
)


def need(reason: str | None) -> None:
    """Skip, where something is missing."""
    if reason is not None:
        pytest.skip(reason)


def need_program(name: str, package: str) -> str:
    """Its path."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package {package})")
    return found


@dataclass
class Place:
    """A folder with its own home, variables and programs."""

    folder: Path
    variables: dict[str, str]

    def run(self, *command: str, code: int | None = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command in it; all that it started is gone, or is ended after ten seconds and told."""
        mark = new_mark()
        environment = {**self.variables, **basics(self.folder, mark), **variables}
        process = subprocess.Popen(
            command, env=environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            left = wait_until_none(mark)
        assert code is None or process.returncode == code, (process.returncode, out[-3000:], err[-6000:])
        assert not left, left
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def wait_until_none(mark: str, within_s: float = 10.0) -> dict[int, str]:
    """Processes of a job that live after so long; they are ended."""
    until = time.monotonic() + within_s
    while (left := alive(mark)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def place(folder: Path, path: Sequence[Path] = (), **variables: str) -> Place:
    """With the commands of ``dropin``, zoo on Python's path, and no variable of a launcher."""
    commands = folder / "commands"
    commands.mkdir()
    for name, where in scripts().items():
        module, _, function = where.partition(":")
        text = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (commands / name).write_text(text)
    text = f"#!{sys.executable}\nfrom zoo.cli import main\nmain()\n"
    (commands / "zoo").write_text(text)
    for file in commands.iterdir():
        file.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    before = [*map(str, path), str(commands), str(Path(sys.executable).parent)]
    environment |= {
        "PATH": os.pathsep.join([*before, os.environ["PATH"]]), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(installed_folder()), *python_path()]), **variables,
    }  # fmt: skip
    return Place(folder, environment)


def python_path() -> list[str]:
    """What this process finds zoo and the tests by."""
    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return [*given, str(ROOT)]


def scripts() -> dict[str, str]:
    """Command → "module:function", as ``dropin`` says."""
    section = (ROOT / "dropin/pyproject.toml").read_text().partition("[project.scripts]\n")[2].partition("\n\n")[0]
    return {
        name.strip(): where.strip().strip('"') for name, _, where in (x.partition("=") for x in section.split("\n"))
    }


def found(said: str) -> list[Any]:
    """World size and losses, of what a job printed."""
    lines = [line.partition("FOUND ")[2] for line in said.splitlines() if "FOUND " in line]
    assert len(lines) == 1, said
    return list(json.loads(lines[0]))


def check(said: str, world: int, expected: Mapping[str, list[float]], kind: str) -> None:
    """The job had so many ranks, and the losses of one rank."""
    ranks, *losses = found(said)
    assert ranks == world
    assert losses == pytest.approx(expected[kind], rel=1e-9)


def free_port() -> str:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return str(tried.getsockname()[1])


@contextlib.contextmanager
def together(*running: subprocess.Popen[str]) -> Iterator[list[str]]:
    """What each of them printed, once all have ended."""
    try:
        yield [process.communicate(timeout=TIMEOUT_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
