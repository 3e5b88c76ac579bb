"""Where an agent says what has become of its ranks: lines on its standard output."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable
from typing import Any


class Outlet:
    """Lines of JSON to whoever rules. It waits where nobody takes them, and listens meanwhile.

    The standard output must not block.

    Args:
        listen: called now and then in such a wait; may set ``closed``, which ends it.
    """

    def __init__(self, listen: Callable[[], None]) -> None:
        self.closed = False
        """Nobody reads any more: what is said is dropped."""
        self._listen = listen
        self._unsent = b"\n"  # what a shell has printed before may have no end of line
        self._lock = threading.Lock()

    def say(self, event: dict[str, Any]) -> None:
        """An event, whole."""
        with self._lock:
            self._unsent += (json.dumps(event) + "\n").encode()
            while self._unsent and not self.closed:
                if not self._write():
                    select.select([], [1], [], 0.5)
                    self._listen()

    def beat(self) -> None:
        """That this process lives, from another thread; nothing where more is on its way, or nobody takes it."""
        if self._lock.acquire(blocking=False):
            try:
                self._unsent += b'{"beat": true}\n' if not self._unsent and not self.closed else b""
                self._write()
            finally:
                self._lock.release()

    def _write(self) -> bool:
        """As much as goes at once. Returns False where that is nothing."""
        try:
            self._unsent = self._unsent[os.write(1, self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
        return True
