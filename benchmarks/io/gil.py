"""Whether Python runs while bytes move: a thread that counts, beside one that keeps operations in flight."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.io.contenders import AsyncSession
from benchmarks.io.fio import command, parse
from benchmarks.io.points import Point

PIECE = 64 << 20


class Counter(threading.Thread):
    """Increments for as long as it is alive."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.cpu_clock: int | None = None
        self.stopping = False

    def run(self) -> None:
        """Count."""
        self.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self.stopping:
            self.count += 1

    def window(self, action: Callable[[], int]) -> dict[str, float]:
        """Counts a second, and the share of the time in which the thread ran, while ``action`` moves bytes."""
        if self.cpu_clock is None:
            raise AssertionError("the counter has not started")
        start, count, cpu = time.perf_counter(), self.count, time.clock_gettime(self.cpu_clock)
        num_bytes = action()
        wall = time.perf_counter() - start
        return {
            "rate": (self.count - count) / wall,
            "running": (time.clock_gettime(self.cpu_clock) - cpu) / wall,
            "bytes_per_s": num_bytes / wall,
        }


def _sleep(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def keep_in_flight(session: AsyncSession, op: str, tensor: torch.Tensor, path: Path, window_s: float) -> int:
    """Operations on all pieces of the tensor, each started again when done, until the window ends; returns bytes."""
    pieces = tensor.split(PIECE)
    tokens: deque[Any] = deque()
    until, num_started, num_bytes = time.perf_counter() + window_s, 0, 0
    while True:
        while len(tokens) < len(pieces) and time.perf_counter() < until:
            piece = num_started % len(pieces)
            tokens.append(session.submit(op, pieces[piece], path, piece * PIECE))
            num_started, num_bytes = num_started + 1, num_bytes + pieces[piece].numel()
        if not tokens:
            return num_bytes
        session.finish(tokens)


def alternate(action: Callable[[], int], num_windows: int, window_s: float) -> dict[str, Any]:
    """Windows with nothing and with ``action`` in turns; a ratio is taken within its pair."""
    counter = Counter()
    counter.start()
    while counter.cpu_clock is None:
        time.sleep(0.001)
    try:
        pairs = [(counter.window(lambda: _sleep(window_s)), counter.window(action)) for _ in range(num_windows)]
    finally:
        counter.stopping = True
        counter.join()
    return {
        "ratios": [busy["rate"] / idle["rate"] for idle, busy in pairs],
        "running": [busy["running"] / idle["running"] for idle, busy in pairs],
        "bytes_per_s": [busy["bytes_per_s"] for _, busy in pairs],
    }


def measure_gil(session: AsyncSession, task: dict[str, Any]) -> dict[str, Any]:
    """The counter beside a session's asynchronous reads or writes of ``num_bytes`` at a time."""
    path, direction, window_s = Path(task["path"]), task["direction"], task["window_s"]
    tensor = session.buffer(task["num_bytes"])
    tensor.fill_(1)
    keep_in_flight(session, direction, tensor, path, 0.1)
    return alternate(lambda: keep_in_flight(session, direction, tensor, path, window_s), task["num_windows"], window_s)


def measure_control(task: dict[str, Any]) -> dict[str, Any]:
    """The same beside fio in another process, which has no GIL to hold: what remains is cores, caches and memory."""
    path, direction, num_bytes = Path(task["path"]), task["direction"], task["num_bytes"]
    line = [*command(task["engine"], direction, Point(**task["point"]), path, num_bytes), "--time_based"]

    def action() -> int:
        result = subprocess.run(
            [*line, f"--runtime={max(1, round(task['window_s']))}"], capture_output=True, text=True, check=True
        )
        return int(parse(result.stdout, direction)["num_bytes"])

    return alternate(action, task["num_windows"], task["window_s"])
