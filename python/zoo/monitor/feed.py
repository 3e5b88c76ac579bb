"""One thread that hands the records of steps to sinks, so that training never waits for a file or a network."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from zoo.parts import Sink, StepRecord

_log = logging.getLogger("zoo.monitor")


class Feed:
    """Gives each record to each sink, in order.

    Records wait in a queue of bounded length. Where sinks are slower than training for so long that it is full, the
    oldest waiting record is dropped and counted. A sink that raises is closed and gets no more; the log says so once.
    The thread begins with the first record and ends with :meth:`close`. A process that ends without closing is closed
    at its exit, which takes 10 seconds at most; one that is killed loses what waits, usually nothing and ``capacity``
    records at most.

    Args:
        sinks: by name.
        capacity: records that may wait.

    Attributes:
        num_dropped: records that no sink got, since the beginning.
        failed: name of each sink that was switched off, and why.
    """

    def __init__(self, sinks: Mapping[str, Sink], *, capacity: int = 1024) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}; records wait in a queue, which needs room for at least one.")
        self._sinks, self._capacity = dict(sinks), capacity
        self._waiting: deque[StepRecord] = deque()
        self._changed = threading.Condition()
        self._busy = self._ended = False
        self._thread: threading.Thread | None = None
        self._at_exit: Callable[[], None] | None = None
        self._expected: weakref.WeakMethod[Callable[[], None]] | None = None
        self.num_dropped = 0
        self.failed: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def put(self, record: StepRecord) -> None:
        """Hand over a record; returns at once.

        Raises:
            ValueError: after :meth:`close`.
        """
        if self._ended:
            raise ValueError("put() after close(): the sinks of this feed are closed.")
        if not self._sinks:
            return
        with self._changed:
            if len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self.num_dropped += 1
                if self.num_dropped == 1:
                    _log.warning(
                        "monitors are slower than training: of %d waiting records the oldest was dropped. "
                        "engine.feed.num_dropped counts them.",
                        self._capacity,
                    )
            self._waiting.append(record)
            self._begin()
            self._changed.notify_all()

    def expect(self, bring: Callable[[], None]) -> None:
        """A record is to come, and ``bring``, a bound method, puts it: it is called where :meth:`close`, or the end of
        the process, comes first. What it raises then is told in the log."""
        if self._sinks and self._expected is None:
            self._expected = weakref.WeakMethod(bring)
            self._begin()  # at its end a process makes no more threads

    def _begin(self) -> None:
        if self._thread is None and not self._ended:
            self._thread = threading.Thread(target=self._run, name="zoo-monitor", daemon=True)
            self._thread.start()
            self._at_exit = _close_at_exit(self)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the sinks have everything that was handed over; False if that took longer than ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Give the sinks what waits, and close them. What takes longer than ``timeout_s`` is left behind, and told;
        another call waits for it again."""
        bring = self._expected() if self._expected is not None and not self._ended else None
        if bring is not None:
            try:
                bring()
            except Exception as error:  # the end is the end
                _log.warning("what came of the last step: %s: %s", type(error).__name__, error)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning(
                    "the monitors %s have not taken %d records after %g s; these are lost unless it is closed again.",
                    ", ".join(self._sinks), len(self._waiting) + 1, timeout_s,
                )  # fmt: skip
                return
        for name in list(self._sinks):
            self._guarded(name, "close")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                record = self._waiting.popleft()
                self._busy = True
            for name in list(self._sinks):
                self._guarded(name, "write", record)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _guarded(self, name: str, what: str, *arguments: StepRecord) -> None:
        sink = self._sinks[name]
        try:
            getattr(sink, what)(*arguments)
        except BaseException as error:  # a monitor must not end a run, nor its thread
            if name in self.failed:  # it failed before, and again while it was closed: that is known
                _log.debug("the monitor %s, which failed, failed in %s() too: %s", name, what, error)
            else:
                self.failed[name] = f"{type(error).__name__}: {error}"
                _log.warning("the monitor %s failed in %s() and is switched off: %s", name, what, self.failed[name])
            if what != "close":
                self._guarded(name, "close")
        if what == "close" or name in self.failed:
            self._sinks.pop(name, None)


def _close_at_exit(feed: Feed) -> Callable[[], None]:
    """Most scripts end without ``engine.destroy()``."""
    found = weakref.ref(feed)

    def close() -> None:
        feed = found()
        if feed is not None:
            feed.close(timeout_s=10.0)

    atexit.register(close)
    return close
