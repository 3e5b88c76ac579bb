"""What a communicator returns: an operation in flight."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zoo.comm.failures import explained
from zoo.comm.log import OpStats


class Handle(Protocol):
    """An operation in flight. ``wait`` returns when the result is in place; calling it again does nothing.

    Where the operation failed, every ``wait`` raises, and always the same error.
    """

    def wait(self) -> None:
        """Block until this rank's part is complete (on CUDA: until the current stream will see it)."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Handle = _Done()


class Then:
    """A handle: waits for others, then runs a function, which may return one more to wait for.

    Args:
        staged: the function begins further collectives, which :meth:`advance` may do before anybody waits.
    """

    __slots__ = ("_error", "_handles", "_more", "_staged", "_then")

    def __init__(self, handles: Sequence[Handle], then: Callable[[], Handle | None], *, staged: bool = False) -> None:
        self._handles, self._staged = handles, staged
        self._then: Callable[[], Handle | None] | None = then
        self._more: Handle | None = None
        self._error: BaseException | None = None

    def advance(self) -> bool:
        """Begin the next stage, which waits for the one before; whether there was one."""
        advanced = [handle.advance() for handle in self._handles if isinstance(handle, Then)]
        if any(advanced):
            return True
        staged, self._staged = self._staged, False
        if staged:
            self._finish_stage()
        return staged

    def _finish_stage(self) -> None:
        if self._error is not None:
            raise self._error
        handles, self._handles = self._handles, ()
        then, self._then = self._then, None
        try:
            for handle in handles:
                handle.wait()
            if then is not None:
                self._more = then()
        except BaseException as error:  # nobody may take what is half done for the result
            self._error = error
            raise

    def wait(self) -> None:
        """See :class:`Handle`."""
        self._finish_stage()
        self._staged = False
        if self._more is not None:
            self._more.wait()  # raises each time where it failed
            self._more = None


def advance(handle: Handle | None) -> None:
    """Begin the second stage of what has two. Called by all ranks at the same point of their programs."""
    if isinstance(handle, Then):
        handle.advance()


def all_of(handles: Sequence[Handle]) -> Handle:
    """One handle for several."""
    return Then(handles, lambda: None)


Dropped = deque[list[Any]]
"""Works of messages whose handles were dropped; each list is waited for from its end."""

_MOST_DROPPED = 16
_dropped: WeakKeyDictionary[Any, Dropped] = WeakKeyDictionary()


def dropped_of(group: Any) -> Dropped:
    """What was dropped of the messages of a process group (None: the default one)."""
    if group is None:
        if not dist.is_initialized():
            return deque()
        group = dist.group.WORLD
    try:
        return _dropped.setdefault(group, deque())
    except TypeError:  # it is no object that lives and dies
        raise ValueError(
            f"a communicator got {group!r} as its group; it takes a process group (dist.new_group(ranks) makes one), "
            "an axis of a DeviceMesh, or None for all ranks."
        ) from None


def finish(dropped: Dropped) -> None:
    """Wait for the oldest of what was dropped, where there is much of it. Its outcome is nobody's affair."""
    while len(dropped) > _MOST_DROPPED:
        with contextlib.suppress(Exception):
            for work in reversed(dropped.popleft()):
                work.wait()


class Pending:
    """Works to wait for, then a function to run once (the additions and scaling after the last message).

    Args:
        works: of the operation, in the order of their waits.
        after: runs when all of them are complete.
        peers: the global ranks whose messages they are, again and again, where each is a message.
        dropped: takes the works when nobody waits for them (:func:`dropped_of`). gloo cancels a message whose work goes
            away, and what its peer has sent then upsets all that comes after it. None: the backend sees to it.
    """

    __slots__ = ("_after", "_dropped", "_error", "_num", "_peers", "_row", "_start", "_works")

    def __init__(
        self, works: list[Any], after: Callable[[], None] | None = None, peers: Sequence[int] | None = None, *,
        dropped: Dropped | None = None,
    ) -> None:  # fmt: skip
        works.reverse()  # waited for from the end, so that the list holds what is still to come
        self._works, self._dropped = works, dropped
        self._num = len(works)
        self._after = after
        self._peers = peers
        self._error: Exception | None = None
        self._row: OpStats | None = None
        self._start: Any = 0.0

    def timed(self, row: OpStats, cuda: bool = False) -> Pending:
        """Add the time from now to completion to a row of the log; on CUDA the time of the current stream."""
        self._row = row
        self._start = _mark() if cuda else time.perf_counter()
        return self

    def __del__(self) -> None:
        if self._dropped is not None and self._works and self._error is None:
            self._dropped.append(self._works)

    def wait(self) -> None:
        """Wait for every work, then run the final function."""
        if self._error is not None:
            raise self._error
        works = self._works
        try:
            # A work is never asked again after it has said yes: some (gloo's messages) would wait for a second one.
            while works:
                works[-1].wait()
                works.pop()
            after, self._after = self._after, None
            if after is not None:
                after()
        except Exception as error:
            # The works stay here: the buffers of those in flight must not go away.
            peer = self._peers[(self._num - len(works)) % len(self._peers)] if self._peers and works else None
            self._error = explained(error, peer) if works else error
            if self._error is error:
                raise
            raise self._error from error
        row, self._row = self._row, None
        if row is not None:
            if isinstance(self._start, float):
                row.host_time_s += time.perf_counter() - self._start
            else:
                row.spans.append((self._start, _mark()))


def _mark() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
