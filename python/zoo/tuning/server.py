"""Starts the ranks of trials: ``python -m zoo.tuning.server PARENT`` imports once what they all need, and forks.

A line of JSON on stdin asks for a trial (``folder``, ``ranks``, ``port``, ``timeout_s``); a line on stdout says how it
ended: ``codes`` of the ranks as ``subprocess`` has them, ``killed``, the ranks that were ended here, and ``in_time``.
The ranks of a trial are a process group, which is killed as a whole. When the process that searches dies, the server is
killed by the system, and with it its ranks (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["run_ranks"]

PATIENCE_S = 5.0
"""So long may peers of a rank that has failed go on, to say why themselves."""
NEEDED = ("zoo.train.job", "zoo.tuning.trial", "zoo.tensor.part", "zoo.pipe.tracing.split", "torch._dynamo")
"""What ranks import, but for their task; torch's optimizers want the last."""


class _Stopped(BaseException):
    """SIGTERM."""


def run_ranks(folder: Path, ranks: int, port: int, timeout_s: float) -> dict[str, Any]:
    """Fork the ranks of a trial and wait for them."""
    pids: list[int] = []
    codes: dict[int, int] = {}
    killed: list[int] = []
    in_time = False
    try:
        for rank in range(ranks):
            pids.append(_fork(folder, rank, ranks, port, pids[0] if pids else 0))
        in_time = _wait(pids, codes, timeout_s)
    finally:
        _reap(pids, codes)
        killed = [rank for rank in range(len(pids)) if rank not in codes]
        if pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pids[0], signal.SIGKILL)  # with what they have started
        for rank in killed:
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
    return {"codes": [codes[rank] for rank in range(ranks)], "killed": killed, "in_time": in_time}


def _fork(folder: Path, rank: int, ranks: int, port: int, group: int) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(pid, group or pid)
        return pid
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, group)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        die_with(server)
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.environ.update({
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        })  # fmt: skip
        from zoo.tuning.trial import work

        code = work(folder, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # peers notice at once
    except BaseException:
        os._exit(1)


def _reap(pids: list[int], codes: dict[int, int]) -> None:
    for rank, pid in enumerate(pids):
        if rank not in codes:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[rank] = os.waitstatus_to_exitcode(status)


def _wait(pids: list[int], codes: dict[int, int], timeout_s: float) -> bool:
    """Until all have ended, or one has failed and its peers had their time; False after the timeout."""
    until, failed = time.monotonic() + timeout_s, False
    while len(codes) < len(pids):
        if time.monotonic() >= until:
            return failed
        time.sleep(0.01)
        _reap(pids, codes)
        if not failed and any(codes.values()):
            failed, until = True, min(until, time.monotonic() + PATIENCE_S)
    return True


def die_with(parent: int) -> None:
    """Be killed when the parent is (Linux); a trial that outlives its search would disturb others."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def main() -> None:
    """Entry point."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the search, which ends this
    signal.signal(signal.SIGTERM, _stop)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints here
    for name in NEEDED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(_Stopped):
        for line in sys.stdin:
            asked: Mapping[str, Any] = json.loads(line)
            found = run_ranks(Path(asked["folder"]), asked["ranks"], asked["port"], asked["timeout_s"])
            answers.write(json.dumps(found) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
