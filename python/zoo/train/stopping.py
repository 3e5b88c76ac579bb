"""Signals: a run that is asked to end saves first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOPPED = 75
"""Exit code of a run that was asked to end, saved, and can be resumed (EX_TEMPFAIL of sysexits.h: try again)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """While it is entered SIGTERM and SIGINT call ``stop``; a second SIGINT interrupts at once, as ever.

    Signals can be caught in the main thread only; in others (simulated ranks) it does nothing.

    Attributes:
        received: the latest signal, None without.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._caught)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.received is signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        self._stop()
