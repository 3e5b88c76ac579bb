"""When the runtime did what: the seconds of one step on this rank, by a watcher of the executor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from zoo.shard.buckets import Bucket
    from zoo.shard.runtime.hooks import Runtime

__all__ = ["Span", "Timer", "timing"]

Where: TypeAlias = tuple[str, str, str]

COMPUTE, COMMUNICATION = "compute", "communication"
FORWARD, BACKWARD, OUTSIDE, WAIT = "forward", "backward", "outside", "wait"
MOST = 20_000
"""Spans that are kept: what comes after them is counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on this rank. Seconds count from where the timing began.

    Attributes:
        lane: "compute", of which there is one thing at a time; or "communication".
        kind: of compute: "forward", "backward", "wait" (for communication), or "outside" of a forward and a backward.
            Of communication: "gather", "reduce" or "publish", from the start until it has been waited for.
        name: the unit that computes, "" outside of the model; of communication and waits, the bucket's units.
        num_bytes: of the whole bucket; 0 of what computes.
    """

    lane: str
    kind: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0


@contextlib.contextmanager
def timing(runtime: Runtime, clock: Callable[[], float] = time.perf_counter) -> Iterator[Timer]:
    """Spans of all that happens inside.

    The clock is the host's. On a GPU a span says when the host has started something, which the device does later.
    """
    executor, timer = runtime.executor, Timer(runtime.where, clock)
    executor.watchers += (timer,)
    try:
        yield timer
    finally:
        executor.watchers = tuple(w for w in executor.watchers if w is not timer)
        timer.close()


class Timer:
    """Writes spans down; see :class:`~zoo.shard.runtime.executor.Watcher`.

    Attributes:
        spans: in the order in which they ended. left_out: how many more there were.
    """

    def __init__(self, where: Callable[[], Where], clock: Callable[[], float]) -> None:
        self.spans: list[Span] = []
        self.left_out = 0
        self._where, self._clock = where, clock
        self._began = clock()
        self._since, self._doing = 0.0, self._computing()
        self._under_way: dict[tuple[str, int], tuple[float, Bucket]] = {}

    def _computing(self) -> tuple[str, str, int]:
        moment, _, unit = self._where()
        return moment, unit, 0

    def _turn(self, doing: tuple[str, str, int] | None = None) -> float:
        """What was done until now is a span; from now on it is ``doing``, or what the runtime says."""
        now = self._clock() - self._began
        kind, name, num_bytes = self._doing
        if now > self._since:
            self._keep(Span(COMPUTE, kind, name, self._since, now, num_bytes))
        self._since, self._doing = now, doing or self._computing()
        return now

    def _keep(self, span: Span) -> None:
        last = self.spans[-1] if self.spans else None
        goes_on = last is not None and span.lane == COMPUTE and last.end_s == span.start_s
        if last is not None and goes_on and replace(last, start_s=span.start_s, end_s=span.end_s) == span:
            self.spans[-1] = replace(last, end_s=span.end_s)
            return
        if len(self.spans) < MOST:
            self.spans.append(span)
        else:
            self.left_out += 1

    def _starts(self, kind: str, bucket: Bucket) -> None:
        now = self._turn()
        if bucket.routes.axes.world.size > 1:
            self._under_way[kind, bucket.index] = now, bucket

    def _ends(self, kind: str, bucket: Bucket) -> None:
        now = self._turn()
        began = self._under_way.pop((kind, bucket.index), None)
        if began is not None:
            self._keep(Span(COMMUNICATION, kind, bucket.label, began[0], now, bucket.num_bytes))

    def moves(self) -> None:
        """Another unit computes from now on."""
        self._turn()

    def unshards(self, bucket: Bucket, *, exact: bool, ahead: bool) -> None:
        """A gather begins."""
        self._starts("gather", bucket)

    def waits(self, bucket: Bucket) -> None:
        """Nothing computes until it is there."""
        self._turn((WAIT, bucket.label, bucket.num_bytes))

    def waited(self, bucket: Bucket) -> None:
        """It is there."""
        self._ends("gather", bucket)

    def resharded(self, bucket: Bucket) -> None:
        """Takes no time to speak of."""

    def reduces(self, bucket: Bucket, dtype: torch.dtype | None) -> None:
        """A reduction begins."""
        self._starts("reduce", bucket)

    def awaits(self, bucket: Bucket) -> None:
        """Nothing computes until it is over."""
        self._turn((WAIT, bucket.label, bucket.num_bytes))

    def reduced(self, bucket: Bucket) -> None:
        """It is over."""
        self._ends("reduce", bucket)

    def publishes(self, bucket: Bucket) -> None:
        """New parameters are on their way."""
        self._starts("publish", bucket)

    def published(self, bucket: Bucket) -> None:
        """They are there."""
        self._ends("publish", bucket)

    def votes(self, num_ranks: int) -> None:
        """Ranks exchange a number, and go on when they have it."""
        self._turn()

    def updates(self) -> None:
        """Backward is over."""
        self._turn()

    def close(self) -> None:
        """The last span ends; what is still under way does too."""
        now = self._turn()
        for (kind, _), (began, bucket) in self._under_way.items():
            self._keep(Span(COMMUNICATION, kind, bucket.label, began, now, bucket.num_bytes))
        self._under_way.clear()
