"""The caller's end of an operation, to be waited for or awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from zoo.io import _native

if TYPE_CHECKING:
    from zoo.io.handle import Handle


class Transfer(NamedTuple):
    """What an operation did."""

    num_bytes: int
    """Bytes moved: all of the tensor."""
    checksum: int | None
    """CRC-32C of them, when it was asked for."""


class Future:
    """An operation on its way. Any thread may wait for it; ``await`` works in any event loop.

    Dropping it stops nothing and frees nothing early: the tensor's memory is kept alive until the transfer is over, and
    a failure is raised by `Handle.wait` or `Handle.close` instead.
    """

    __slots__ = ("__weakref__", "_engine", "_handle", "_ticket")

    def __init__(self, ticket: _native.Ticket, handle: Handle, engine: _native.Engine) -> None:
        self._ticket, self._handle, self._engine = ticket, handle, engine

    def done(self) -> bool:
        """Whether it is over, well or badly."""
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> Transfer:
        """Wait until it is over, at most ``timeout`` seconds.

        Raises:
            TransferError: what went wrong, with path, offset and length.
            TimeoutError: it is still on its way; wait again.
        """
        found = self._ticket.wait(timeout)
        if found is None:
            raise TimeoutError(f"the transfer is still on its way after {timeout} s; wait again, or longer")
        return Transfer(*found)

    result = wait

    def __await__(self) -> Generator[object, None, Transfer]:
        if not self.done():
            yield from self._handle.bell(self._engine).watch(self).__await__()
        return self.wait()


class LoopBell:
    """Tells one event loop that operations ended, without a thread."""

    def __init__(self, engine: _native.Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._bell = engine.bell()
        # Weak, because the handle keeps a bell as long as its loop lives.
        self._loop = weakref.ref(loop)
        self._waiting: dict[asyncio.Future[None], Future] = {}
        self._listening = False

    def watch(self, future: Future) -> asyncio.Future[None]:
        """A future of the loop that is done when ``future`` is."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = future
        if not self._listening:
            loop.add_reader(self._bell.fileno(), self._rung)
            self._listening = True
        # It may have ended before anybody listened.
        loop.call_soon(self._rung)
        return waiter

    def _rung(self) -> None:
        self._bell.reset()
        for waiter, future in list(self._waiting.items()):
            if waiter.cancelled() or future.done():
                del self._waiting[waiter]
                if not waiter.done():
                    waiter.set_result(None)
        loop = self._loop()
        if not self._waiting and self._listening and loop is not None:
            loop.remove_reader(self._bell.fileno())
            self._listening = False
