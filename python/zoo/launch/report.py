"""The last screen of a job that failed: what was first, whole; what followed from it, a line each."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

_LOST = re.compile(
    r"connection (closed|reset|refused|was (closed|reset))|broken pipe|socket|timed out waiting|does not answer|"
    r"peer is gone|remote process exited|nccl communicator was aborted|nccl error|no error|closed by peer|"
    r"failed to (send|recv|connect)",
    re.IGNORECASE,
)
_LINES, _VICTIMS = 60, 12


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that ended a job, or was ended with it."""

    host: str
    time: float
    """Seconds since the epoch, by the clock of that host."""
    summary: str
    """One line."""
    detail: str = ""
    """A traceback, or what was printed last."""
    rank: int | None = None
    """None: of the node as a whole."""
    code: int = 1
    """Exit code; -n: by signal n."""
    lost: bool = False
    """It says that a connection is lost: somebody else had ended before."""
    stopped: bool = False
    """It ended because it was told to."""

    @property
    def who(self) -> str:
        """The rank and its host."""
        return f"host {self.host}" if self.rank is None else f"rank {self.rank} on host {self.host}"


def is_lost_connection(kind: str, text: str) -> bool:
    """Whether an exception of this type and text follows from the end of another process."""
    return kind.startswith("Dist") or (kind in _OF_CONNECTIONS and bool(_LOST.search(text)))


_OF_CONNECTIONS = ("RuntimeError", "ConnectionError", "ConnectionResetError", "BrokenPipeError", "OSError", "")


def code_of(text: int) -> str:
    """``-9`` → "killed by SIGKILL", ``3`` → "exit code 3"."""
    if text >= 0:
        return f"exit code {text}"
    try:
        return f"killed by {signal.Signals(-text).name}"
    except ValueError:
        return f"killed by signal {-text}"


def of_exit(
    host: str, rank: int, code: int, moment: float, *, report: dict[str, str] | None, last: str, stopped: bool
) -> Failure:  # fmt: skip
    """The failure of a rank that ended with another exit code than 0.

    Args:
        report: what its exception was, where it told: "time", "type", "text", "traceback".
        last: what it printed last.
        stopped: it had been told to end.
    """
    if report is not None:
        lines = report["text"].strip().splitlines() or [""]
        summary = f"{report['type']}: {lines[0]}" if lines[0] else report["type"]
        lost = is_lost_connection(report["type"], report["text"])
        moment, detail = float(report["time"]), report["traceback"]
        # What it raised before it was told to end is its own.
        stopped = stopped and report["type"] == "KeyboardInterrupt"
    else:
        words = [line for line in last.splitlines() if line.strip()]
        summary = code_of(code) + (f"; it printed last: {words[-1].strip()[:300]}" if words and code > 0 else "")
        lost = code > 0 and bool(words) and bool(_LOST.search(words[-1]))
        detail = "\n".join(last.splitlines()[-20:])
    return Failure(
        host=host, rank=rank, time=moment, summary=summary, detail=detail, code=code, lost=lost, stopped=stopped
    )


def cause(failures: Sequence[Failure]) -> Failure:
    """The earliest that is no lost connection and was not told to end; else the earliest lost connection."""
    return min(failures, key=lambda one: (one.stopped, one.lost, one.time))


def screen(failures: Sequence[Failure]) -> str:
    """What is printed at the end; its last line names the cause."""
    first = cause(failures)
    said = [f"zoo launch: {first.who} failed first, at {_clock(first.time)}:"]
    said += first.detail.rstrip().splitlines()[-_LINES:]
    others = sorted((one for one in failures if one is not first), key=lambda one: one.time)
    for one in others[:_VICTIMS]:
        how = "was ended" if one.stopped else "lost a connection" if one.lost else "failed"
        said.append(f"zoo launch: {one.who} {how} {one.time - first.time:+.2f} s: {one.summary[:200]}")
    if len(others) > _VICTIMS:
        said.append(f"zoo launch: and {len(others) - _VICTIMS} more.")
    said.append(f"zoo launch: the cause: {first.who}: {first.summary}")
    return "\n".join(said) + "\n"


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f"{moment % 1:.3f}"[1:]


def exit_code(first: Failure) -> int:
    """That of the whole: of what was first, as a shell counts; never 0."""
    return 128 - first.code if first.code < 0 else first.code or 1
