"""The fork server: a process that has imported what tests need, and from which their processes are forked.

Importing torch and zoo takes seconds of CPU; a fork takes milliseconds. Nothing here may have begun what a fork does
not carry over: no thread, no process group, no I/O engine. The server looks at its own threads before it serves.

``python server.py SOCKET`` listens there until no client has been connected for a while. A client sends a request with
three open files, gets the exit status when the process has ended, and kills the process by closing the connection.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
import types
import warnings
from typing import Any

PRELOADED = (
    "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "hypothesis", "pytest",
    "zoo.checkpointing", "zoo.comm", "zoo.config", "zoo.engine", "zoo.io", "zoo.kernels", "zoo.optim", "zoo.sim",
    "zoo.zero", "zoo.cli.app", "zoo.train", "zoo.examples.byte_lm", "zoo.lr_schedules",
)  # fmt: skip
LINGER_S = 5.0
LENGTH, ENDED = struct.Struct("!I"), struct.Struct("!id")


class Server:
    """One thread, one loop: connections that ask, children that end."""

    def __init__(self, path: str) -> None:
        self.children: dict[int, socket.socket] = {}
        self.clients: dict[socket.socket, int | None] = {}
        self.watched = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{path}.new")
        self.listener.listen(64)
        os.rename(f"{path}.new", path)  # whoever sees it can connect
        self.watched.register(self.listener, selectors.EVENT_READ)

    def serve(self) -> None:
        idle_s = 0.0
        while idle_s < LINGER_S:
            wait_s = 0.01 if self.children else 0.5
            events = self.watched.select(wait_s)
            idle_s = idle_s + wait_s if not events and not self.clients else 0.0
            for key, _ in events:
                if key.fileobj is self.listener:
                    client, _ = self.listener.accept()
                    self.clients[client] = None
                    self.watched.register(client, selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)
            self._reap()

    def _hear(self, client: socket.socket) -> None:
        head, files, _, _ = socket.recv_fds(client, LENGTH.size, 3)
        if not head:
            self._leave(client)
            return
        (size,) = LENGTH.unpack(head)
        request = b""
        while len(request) < size:
            request += client.recv(size - len(request))
        pid = os.fork()
        if pid == 0:
            self._close()
            become(json.loads(request), files)
        for file in files:
            os.close(file)
        self.clients[client] = pid
        self.children[pid] = client

    def _leave(self, client: socket.socket) -> None:
        self.watched.unregister(client)
        pid = self.clients.pop(client)
        if pid in self.children:  # not reaped yet, so the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        client.close()

    def _reap(self) -> None:
        for pid in list(self.children):
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                client = self.children.pop(pid)
                with contextlib.suppress(OSError):  # the client may have gone
                    client.sendall(ENDED.pack(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))

    def _close(self) -> None:
        self.listener.close()
        self.watched.close()
        for client in self.clients:
            client.close()


def become(request: dict[str, Any], files: list[int]) -> None:
    """Be, in a forked child, what ``python -c PROGRAM ARGUMENTS`` or ``python FILE ARGUMENTS`` would be."""
    code = 1
    try:
        _settle(request, files)
        code = _execute(request)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)  # what C libraries have printed
        os._exit(code)


def _settle(request: dict[str, Any], files: list[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = [request["file"] or "-c", *request["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(request["file"])) if request["file"] else ""
    sys.path[1:1] = [p for p in request["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
    importlib.invalidate_caches()
    if request["env"].get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = (_unbuffered(place) for place in (1, 2))
    sys.modules[
        "torch"
    ].default_generator.seed()  # as a new process: ranks alike by accident would hide what is missing
    if request["warnings"]:
        warnings.simplefilter(request["warnings"])
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__dict__["__builtins__"] = __builtins__


def _unbuffered(place: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(open(place, "wb", 0, closefd=False), write_through=True)


def _execute(request: dict[str, Any]) -> int:
    try:
        if request["file"]:
            runpy.run_path(request["file"], run_name="__main__")
        else:
            exec(compile(request["program"], "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def main() -> None:
    """Import, check that a fork is safe, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its clients, which get the interrupt themselves
    sys.path[0] = ""  # not this folder: its modules are not to be found by their bare names
    os.environ["EAGER_IMPORT"] = "1"  # for lazy_loader: what a package names is imported here, not in each process
    for name in os.environ.get("ZOO_TEST_PRELOAD", " ".join(PRELOADED)).split():
        importlib.import_module(name)
    del os.environ["EAGER_IMPORT"]
    if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("importing zoo started a thread: processes cannot be forked from here")
    gc.collect()
    gc.freeze()
    Server(sys.argv[1]).serve()


if __name__ == "__main__":
    main()
