"""Seconds of the phases of a step, for ``wall_clock_breakdown``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Adds up the seconds of each phase until they are read. On a GPU each waits for its end, which costs time."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, phase: str, device: torch.device) -> Iterator[None]:
        """What runs inside is a part of ``phase``."""
        start = _now(device)
        try:
            yield
        finally:
            self._spent[phase] = self._spent.get(phase, 0.0) + _now(device) - start

    def read(self) -> dict[str, float]:
        """``"time/<phase>_s"`` → seconds since the last reading."""
        found = {f"time/{phase}_s": seconds for phase, seconds in self._spent.items()}
        self._spent.clear()
        return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
