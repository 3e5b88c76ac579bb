"""Families of processes on Linux: who dies with whom, and the end of all that is left.

Three means, because none is enough alone. A *death signal* (``PR_SET_PDEATHSIG``) reaches a child whose parent is
killed; but it follows the parent's thread, is cleared by setuid programs, and is not inherited by grandchildren. A
*subreaper* (``PR_SET_CHILD_SUBREAPER``) becomes the parent of orphans beneath it, daemons too, so that it can find and
end them. And a pipe from whoever rules: at its end the reader knows that the writer is gone, on another host too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

LONGEST_S = 3600.0
"""Of one wait for events: a month is an error there."""
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of linux/prctl.h


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Have this process get signal ``number`` when its parent ends; at once if that is no longer ``parent``.

    To be called by the child itself, after ``exec`` of a setuid program too. The thread of the parent that started
    this process is what counts: it has to be one that lives as long as the parent, its first.
    """
    _prctl(_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def wait_s(times: list[float]) -> float | None:
    """Seconds until the first of these moments of ``time.monotonic``, but no more than :data:`LONGEST_S`; None without
    any."""
    return min(max(0.0, min(times) - time.monotonic()), LONGEST_S) if times else None


def adopt_orphans() -> None:
    """Have descendants of this process whose parents have ended become its children."""
    _prctl(_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Living processes beneath ``pid``, those that wait to be reaped left out; parents before children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    children.setdefault(int(parent), []).append(int(name))
    found, todo = list[int](), [pid]
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def send(number: int, pids: list[int]) -> None:
    """A signal to each of these that is still there and may be signalled."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """(process, exit status) of each child that has ended since; -n: by signal n."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def end_descendants(grace_s: float, patience_s: float = 5.0) -> list[int]:
    """End all that is beneath this process: SIGTERM, and SIGKILL after ``grace_s`` seconds. Returns what is left after
    ``patience_s`` more: processes that may not be signalled, or that the kernel holds."""
    me, began, told = os.getpid(), time.monotonic(), set[int]()
    while left := descendants(me):
        passed = time.monotonic() - began
        if passed > grace_s + patience_s:
            return left
        if passed >= grace_s:
            send(signal.SIGKILL, left)
        else:
            send(signal.SIGTERM, [pid for pid in left if pid not in told])
            told.update(left)
        reap()
        time.sleep(0.02)
    reap()
    return []
