"""Ranks on this machine, started for one measurement."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from zoo.cli.bench.collectives import Measured, Settings
from zoo.cli.bench.on_a_rank import takes_gpu

_PATIENCE_S = 5.0
_SLACK_S = 120.0
_OF_PEERS = ("RankFailedError", "a peer is gone")  # in the words of a rank that has not failed by itself
MOST = 64


class RanksError(RuntimeError):
    """A rank that was started here failed; the message is its reason."""


def measure_here(ranks: int, settings: Settings) -> Measured:
    """The measurement over so many processes of this machine.

    Raises:
        ValueError: a number of ranks that is none; a GPU that is not here.
        RanksError: one failed; the others are ended.
    """
    if not 2 <= ranks <= MOST:
        raise ValueError(f"ranks = {ranks}; allowed are 2 to {MOST} processes on one machine.")
    if settings.device == "cuda":
        takes_gpu(settings)  # here, before ranks are started that would all say so
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "zoo.cli.bench.on_a_rank", settings.to_json(), str(path)]
        run_ranks([command] * ranks, timeout_s=settings.seconds + _SLACK_S)
        return Measured.from_dict(json.loads(path.read_text(encoding="utf-8")))


def run_ranks(commands: Sequence[Sequence[str]], *, timeout_s: float) -> None:
    """Run a command a rank, with torchrun's variables, to the end of all of them.

    Raises:
        RanksError: a rank did not end with 0, or all of them not in time: with what that rank, the first that failed,
            wrote to its error output; the others are ended.
    """
    size, end = len(commands), time.monotonic() + timeout_s
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, **shared}
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[str], IO[str]]] = []
        for rank, command in enumerate(commands):
            told = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            mine = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env=mine, stdin=subprocess.DEVNULL, stdout=told, stderr=told, text=True)
            stack.callback(_end, process)
            started.append((process, told))
        failed = _failed([process for process, _ in started], end)
        if failed is None:
            raise RanksError(f"{size} ranks have not ended in {timeout_s:.0f} s; they are ended now.")
        said = []
        for rank in failed:
            process, told_by = started[rank]
            told_by.seek(0)
            said.append(_reason(rank, process.returncode, told_by.read()))
    if said:  # of ranks that lost a peer only where nobody says why
        raise RanksError(next((text for text in said if not any(sign in text for sign in _OF_PEERS)), said[0]))


def _failed(processes: Sequence[subprocess.Popen[str]], end: float) -> list[int] | None:
    """The ranks that had failed at the first look that found any; [] if all ended well, None if not in time."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or all(code == 0 for code in codes):
            return failed
        if time.monotonic() > end:
            return None
        time.sleep(0.02)


def _reason(rank: int, code: int, text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("zoo: ") for line in lines if line.startswith("zoo: ")]
    reason = said[-1] if said else lines[-1] if lines else f"it ended with status {code} and said nothing"
    return reason if reason.startswith("rank ") else f"rank {rank}: {reason}"


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
