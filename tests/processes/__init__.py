"""Processes of tests, forked from one that has imported torch and zoo already.

* :func:`run`: a program to its end, like ``subprocess.run([sys.executable, "-c", program, ...])``.
* :func:`run_ranks`: a function on several ranks of a gloo process group.
* :func:`start`: a program that goes on beside the test.

A test of what a *new* interpreter does (what an import brings along, how the command line starts, variables that torch
or the C library read when they are loaded) starts one with ``subprocess``, as everywhere. ``ZOO_TEST_FORK=0`` makes
everything here do so too: the same results are expected, only later.

One server is shared by the whole run: xdist's workers find it through a socket in a folder whose name is in the
environment. It starts with the first process that is asked for and ends some seconds after the last worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from tests.cpu import elsewhere
from tests.processes.server import ENDED, LENGTH

FOLDER = "ZOO_TEST_FORK_FOLDER"
STARTING_S = 180.0
_connections: list[socket.socket] = []


class Process:
    """A forked process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; that of a process killed by signal ``n`` is ``-n``.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(ENDED.size, socket.MSG_WAITALL)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            if len(answer) != ENDED.size:
                raise AssertionError("the fork server is gone")
            self.returncode, cpu_s = ENDED.unpack(answer)
            elsewhere[0] += cpu_s
        return self.returncode

    def kill(self) -> None:
        """End it now, with its children."""
        self._connection.close()
        if self.returncode is None:
            self.returncode = -9


@contextlib.contextmanager
def started(
    program: str | Path, *arguments: object, stdin: IO[Any] | None = None, stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None, env: Mapping[str, str] | None = None, warnings: str = "",
) -> Iterator[Any]:  # fmt: skip
    """:func:`start`, for a ``with`` block at whose end the process is killed if it is still there."""
    process = start(program, *arguments, stdin=stdin, stdout=stdout, stderr=stderr, env=env, warnings=warnings)
    try:
        yield process
    finally:
        process.kill()


def start(
    program: str | Path, *arguments: object, stdin: IO[Any] | None = None, stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None, env: Mapping[str, str] | None = None, warnings: str = "",
) -> Any:  # fmt: skip
    """Begin a program: source text, or a file when it is a ``Path``.

    Args:
        arguments: its ``sys.argv[1:]``.
        stdin: open files; nothing to read if not given.
        stdout: pytest's own if not given; so ``stderr``.
        env: all of its environment; that of the test if not given.
        warnings: as of ``python -W``.

    Returns:
        A :class:`Process`; call its ``wait`` or its ``kill`` in any case.
    """
    environment = dict(os.environ if env is None else env)
    words = [str(word) for word in arguments]
    file = str(program) if isinstance(program, Path) else ""
    with open(os.devnull) as nothing:
        files = [stdin or nothing, stdout, stderr]
        if os.environ.get("ZOO_TEST_FORK") == "0":
            options = ["-W", warnings] if warnings else []
            command = [sys.executable, *options, *([file] if file else ["-c", str(program)]), *words]
            return subprocess.Popen(command, stdin=files[0], stdout=stdout, stderr=stderr, env=environment)
        request = {
            "program": str(program), "file": file, "arguments": words, "env": environment, "cwd": os.getcwd(),
            "warnings": warnings,
        }  # fmt: skip
        connection = _connect()
        numbers = [place if open_file is None else open_file.fileno() for place, open_file in enumerate(files)]
        text = json.dumps(request).encode()
        socket.send_fds(connection, [LENGTH.pack(len(text))], numbers)
        connection.sendall(text)
    return Process(connection)


def run(
    program: str | Path, *arguments: object, env: Mapping[str, str] | None = None, warnings: str = "",
    timeout: float = 120, check: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program to its end and give its exit status and what it said; arguments as of :func:`start`.

    Raises:
        subprocess.TimeoutExpired: it was killed, because it took longer than ``timeout`` seconds.
        AssertionError: ``check``, and its status is not 0; with what it said.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with started(program, *arguments, stdout=out, stderr=err, env=env, warnings=warnings) as process:
            status = process.wait(timeout)
        out.seek(0)
        err.seek(0)
        done = subprocess.CompletedProcess([str(program), *map(str, arguments)], status, out.read(), err.read())
    if check and status:
        raise AssertionError(f"the program ended with status {status}\n{done.stdout}{done.stderr}")
    return done


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, timeout: float = 100, group_timeout_s: float = 60
) -> dict[int, Any]:
    """Call ``function(rank, *args)`` on ``world`` processes that have joined a gloo process group.

    Args:
        function: of a module's top level; the processes import its file anew. What it is given and returns is pickled.
        timeout: seconds after which those that are still running are killed.
        group_timeout_s: of the process group.

    Returns:
        What it returned, of each rank that lived to the end.

    Raises:
        AssertionError: some rank raised; with its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-ranks-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        job = {
            "file": function.__code__.co_filename, "module": f"{function.__module__}_on_a_rank",
            "name": function.__qualname__, "args": args, "world": world, "group_timeout_s": group_timeout_s,
            "path": sys.path,
        }  # fmt: skip
        (folder / "job").write_bytes(pickle.dumps(job))
        script = Path(__file__).with_name("rank.py")
        processes = [stack.enter_context(started(script, folder, rank)) for rank in range(world)]
        end = time.monotonic() + timeout
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
        found = {
            r: pickle.loads((folder / f"rank{r}").read_bytes()) for r in range(world) if (folder / f"rank{r}").exists()
        }
    wrong = [f"rank {rank} raised:\n{value}" for rank, (fine, value) in found.items() if not fine]
    if wrong:
        raise AssertionError("\n".join(wrong))
    return {rank: value for rank, (_, value) in found.items()}


def _connect() -> socket.socket:
    folder = Path(os.environ[FOLDER])
    path = folder / "socket"
    if not _connections:
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _start_server(path)
        _connections.append(_connected(path))  # held, so that the server stays
    return _connected(path)


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return connection


def _start_server(path: Path) -> None:
    # One thread in every library: a pool that has been started does not survive a fork.
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("server.py")), str(path)]
    environment = {k: v for k, v in {**os.environ, **single}.items() if k != "PYTHONUNBUFFERED"}
    with open(path.with_name("log"), "w") as log:
        server = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    end = time.monotonic() + STARTING_S
    while not path.exists():
        if server.poll() is not None or time.monotonic() > end:
            server.kill()
            raise AssertionError(f"the fork server did not start:\n{path.with_name('log').read_text()}")
        time.sleep(0.02)


def make_folder() -> Callable[[], None]:
    """Choose the folder that all workers of this run share; the result removes it."""
    if FOLDER in os.environ:
        return lambda: None
    folder = tempfile.mkdtemp(prefix="zoo-fork-")
    os.environ[FOLDER] = folder

    def remove() -> None:
        for connection in _connections:
            connection.close()
        _connections.clear()
        del os.environ[FOLDER]
        shutil.rmtree(folder, ignore_errors=True)

    return remove
