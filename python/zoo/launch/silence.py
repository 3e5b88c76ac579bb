"""Whether the other end of a connection still lives, where a cable that is cut or a machine that is off says nothing.

Both ends say something every *beat*, a fifth of the time after which the other one counts as lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BEATS = 5


class Silence:
    """How long nothing has been heard.

    It counts the turns of whoever listens, and no turn for more than two beats: a listener that was itself stopped, or
    waited for a terminal, blames nobody for that time.

    Args:
        lost_s: silence after which the other end is lost.
        now: a clock, in seconds.
    """

    def __init__(self, lost_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self.lost_s, self.beat_s = lost_s, lost_s / _BEATS
        self._now, self._last, self._silent_s = now, now(), 0.0

    def turn(self, heard: bool) -> bool:
        """A turn is over, in which something was heard or not. Returns whether the other end is lost. There has to be
        a turn every beat."""
        passed, self._last = self._now() - self._last, self._now()
        self._silent_s = 0.0 if heard else self._silent_s + min(passed, 2 * self.beat_s)
        return self._silent_s > self.lost_s


class Beats:
    """Calls something every ``beat_s`` seconds, in a thread of its own, until it is closed."""

    def __init__(self, beat_s: float, send: Callable[[], None]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(beat_s, send), daemon=True)
        self._thread.start()

    def _run(self, beat_s: float, send: Callable[[], None]) -> None:
        while not self._over.wait(beat_s):
            send()

    def close(self) -> None:
        """None comes after this."""
        self._over.set()
        self._thread.join()
