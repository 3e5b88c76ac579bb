"""Trials as processes: started, watched, and killed as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from zoo.config.document import Document
from zoo.tuning.needs import settings, with_settings
from zoo.tuning.outcome import Outcome, representative
from zoo.tuning.space import Candidate, Job
from zoo.tuning.trial import rank_file

__all__ = ["Measuring", "Processes", "collect", "write_trial"]

LOST = ("connection", "peer", "socket", "timed out", "broken pipe")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Without a value, no GPU is seen."""
TICK_S = 1e-9
"""No clock here tells less."""


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What a trial measures: steps ``first`` to ``last``, and more until they took ``least_s`` in all.

    ``task``: of the user's own, ``module:function``."""

    first: int = 3
    last: int = 5
    least_s: float = 1.0
    task: str | None = None


def write_trial(folder: Path, document: Document, measuring: Measuring) -> None:
    """What the ranks of a trial read; old results go."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*"):
        old.unlink()
    values = {key: value for key, value in document.values.items() if key != "autotuning"}
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    options = {
        "first": measuring.first, "last": measuring.last, "least_s": measuring.least_s, "task": measuring.task,
    }  # fmt: skip
    (folder / "trial.json").write_text(json.dumps(options) + "\n", encoding="utf-8")


@dataclass(kw_only=True)
class Processes:
    """A runner of trials on this machine, one process a rank, forked from one that has imported what they need.

    Use it as a context: at its end all of its processes are gone.

    Args:
        document: the configuration that candidates are made of.
        folder: of what trials leave: ``trial-0001/config.json``, and a log and a result for each rank.
        limit_bytes: resident memory of all ranks together (on the CPU) above which a trial had too much.
    """

    document: Document
    job: Job
    folder: Path
    measuring: Measuring = Measuring()
    limit_bytes: int | None = None
    _server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, number: int, candidate: Candidate, timeout_s: float) -> Outcome:
        """See :class:`zoo.tuning.outcome.Runner`."""
        began = time.perf_counter()
        folder = (self.folder / f"trial-{number:04d}").absolute()
        try:
            write_trial(folder, with_settings(self.document, settings(candidate, self.job)), self.measuring)
        except OSError as error:
            why = f"the folder of trials {str(self.folder)!r} cannot be written to: {error.strerror}"
            return Outcome(status="failed", why=why, took_s=time.perf_counter() - began)
        try:
            found = self._ask({
                "folder": str(folder), "ranks": self.job.ranks, "port": _free_port(), "timeout_s": timeout_s,
            })  # fmt: skip
        except BaseException:
            self.close()
            raise
        took_s = time.perf_counter() - began
        if not found:
            self.close()
            return Outcome(status="failed", why="the process that starts ranks is gone", took_s=took_s)
        return collect(
            folder, found["codes"], timeout_s=None if found["in_time"] else timeout_s, took_s=took_s,
            limit_bytes=self.limit_bytes, killed=found["killed"],
        )  # fmt: skip

    def _ask(self, trial: dict[str, Any]) -> dict[str, Any]:
        """A trial by the server, which is started if it is not there; {} where it has ended instead of answering."""
        if self._server is None or self._server.poll() is not None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "zoo.tuning.server", str(os.getpid())], text=True, start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **self._devices()},
            )  # fmt: skip
        stdin, stdout = self._server.stdin, self._server.stdout
        if stdin is None or stdout is None:
            raise AssertionError("the server of trials has no pipes.")
        with contextlib.suppress(BrokenPipeError, json.JSONDecodeError):  # it was killed, in the middle of a line too
            stdin.write(json.dumps(trial) + "\n")
            stdin.flush()
            found: dict[str, Any] = json.loads(stdout.readline() or "{}")
            return found
        return {}

    def _devices(self) -> dict[str, str]:
        """What hides GPUs from trials that are to run on the CPU: zoo takes a GPU wherever it sees one."""
        return dict.fromkeys(HIDING, "") if self.job.device == "cpu" else {}

    def close(self) -> None:
        """End the server, and with it every rank; the next trial starts another one."""
        server, self._server = self._server, None
        if server is None:
            return
        server.terminate()  # it kills its ranks first
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def collect(
    folder: Path, codes: Sequence[int], *, timeout_s: float | None, took_s: float, limit_bytes: int | None = None,
    killed: Sequence[int] = (),
) -> Outcome:  # fmt: skip
    """What the ranks of a trial came to.

    Args:
        codes: their exit codes, as ``subprocess`` has them.
        timeout_s: the timeout that has ended it; None where none has.
        killed: ranks that were killed here, whose exit by SIGKILL tells nothing.
    """
    said = [_read(rank_file(folder, rank)) for rank in range(len(codes))]
    short = next((s["why"] for s in said if s.get("status") == "memory"), None)
    if short is None and any(code == -signal.SIGKILL for rank, code in enumerate(codes) if rank not in killed):
        rank = next(r for r, code in enumerate(codes) if code == -signal.SIGKILL and r not in killed)
        if timeout_s is None:
            short = f"rank {rank} was ended by SIGKILL, as the system does when memory runs out"
    if short is not None:
        return Outcome(status="memory", why=short, took_s=took_s)
    if timeout_s is not None:
        return Outcome(status="timeout", why=f"did not end within {timeout_s:g} s", took_s=took_s)
    failed = sorted((s for s in said if s.get("status")), key=lambda s: (_lost(s["why"]), s["at"]))
    if failed:
        return Outcome(status="failed", why=failed[0]["why"], took_s=took_s)
    silent = next((rank for rank, s in enumerate(said) if "steps_s" not in s), None)
    if silent is not None:
        return Outcome(status="failed", why=_last_words(folder, silent, codes[silent]), took_s=took_s)
    peaks = tuple(int(s["peak_bytes"]) for s in said)
    if limit_bytes is not None and sum(peaks) > limit_bytes:
        why = f"{sum(peaks):,} bytes were resident at most, and there are {limit_bytes:,}"
        return Outcome(status="memory", why=why, peak_bytes=peaks, took_s=took_s)
    walls = zip(*(s["steps_s"] for s in said), strict=True)
    waits = zip(*(s["waits_s"] for s in said), strict=True)
    # Where the whole step was waiting, by clocks that differ, its own time is not known: the wall's is.
    pairs = [(max(wall), max(wait)) for wall, wait in zip(walls, waits, strict=True)]
    steps = tuple(wall - wait if wall > wait else max(wall, TICK_S) for wall, wait in pairs)
    return Outcome(
        status="measured", step_s=representative(steps), steps_s=steps, peak_bytes=peaks, took_s=took_s,
    )  # fmt: skip


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _lost(why: str) -> bool:
    """Whether a rank says no more than that another one is gone."""
    return any(sign in why.lower() for sign in LOST)


def _last_words(folder: Path, rank: int, code: int) -> str:
    """The last line of a rank that did not say itself what was wrong."""
    try:
        text = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"rank {rank}: {lines[-1]}" if lines else f"rank {rank} ended with {how} and said nothing"
