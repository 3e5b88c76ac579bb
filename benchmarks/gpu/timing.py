"""Seconds of functions on a device: CUDA events around each call, or the clock where there is no GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Timer:
    """Times calls on ``device``; contenders take turns, and the order rotates from round to round.

    ``clock`` says what a second is where there is no GPU.
    """

    def __init__(self, device: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self.clock = device, clock
        self.cuda = device.startswith("cuda")

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of one call."""
        if not self.cuda:
            began = self.clock()
            call()
            return self.clock() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def rounds(self, calls: Mapping[str, Callable[[], Any]], *, most: int, limit_s: float) -> dict[str, list[float]]:
        """Seconds of every call in up to ``most`` rounds, at least one; none begins after ``limit_s``."""
        names = list(calls)
        began = time.monotonic()
        for name in names:  # warm: allocations, first steps of optimizers
            for _ in range(2):
                calls[name]()
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(most):
            if turn and time.monotonic() - began > limit_s:
                break
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds[name].append(self.once(calls[name]))
        return seconds

    def copy_bandwidth(self, num_bytes: int) -> float:
        """Bytes a second of a copy within the device's memory, read and written ones counted: the yardstick."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds = self.rounds({"copy": lambda: target.copy_(source)}, most=20, limit_s=5.0)["copy"]
        return 2 * num_bytes / statistics.median(seconds)
