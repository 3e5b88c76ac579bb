"""How ranks that share memory tell each other where their blocks are: headers of a few numbers, to every peer alike.

Between processes they go through pipes: a header is one system call on each side, made by the rank itself. (A message
on gloo is three in each direction, by a thread that has to be woken for each, and that spins while the rank is
interrupted in a call of its own.) A pipe also ends with its writer: a process that dies is noticed at once. Simulated
ranks send messages on their group, because only there their scheduler sees who waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from zoo.comm.failures import reported

Key = tuple[int, int]
"""The tag of a collective and the number of its block."""

_HEADER = struct.Struct("<4q")  # tag, number, offset and bytes of a block
_READ_BYTES = 128 * _HEADER.size  # reads of whole headers: writes of one are never divided
_SLICE_S = 0.2  # so long one thread keeps others from reading the same pipe
_REPORT_S = 1.0  # so long a rank that closed its pipe may take to say why it leaves
# Headers that nobody waits for are taken in after so many; with those in flight (at most 1024) they fit into a pipe.
_DRAIN_EVERY = 256
_PIPE_BYTES = 1 << 16


class Post(Protocol):
    """Sends headers to all peers and receives theirs."""

    def exchange(self, key: Key, low: int, num_bytes: int) -> tuple[dict[int, Callable[[], list[int]]], list[Any]]:
        """Send a header to every peer, without waiting.

        Returns:
            for each peer, what waits for its header of the same key and returns (number, offset, bytes); and works
            to wait for besides.
        """

    def forget(self, key: Key, peer: int) -> None:
        """Nobody will ask for this header."""


class GroupPost:
    """Headers as messages of a process group."""

    def __init__(self, group: Any, peers: Sequence[int]) -> None:
        self._group, self._peers = group, peers

    def exchange(self, key: Key, low: int, num_bytes: int) -> tuple[dict[int, Callable[[], list[int]]], list[Any]]:
        """See :class:`Post`."""
        group, (tag, number) = self._group, key
        header = torch.tensor([number, low, num_bytes])
        rooms = {peer: torch.empty_like(header) for peer in self._peers}
        works = {peer: group.recv([rooms[peer]], peer, tag) for peer in self._peers}
        sends = [group.send([header], peer, tag) for peer in self._peers]

        def receive(peer: int) -> list[int]:
            works[peer].wait()
            found: list[int] = rooms[peer].tolist()
            return found

        return {peer: partial(receive, peer) for peer in self._peers}, sends

    def forget(self, key: Key, peer: int) -> None:
        """See :class:`Post`: the group knows of no way."""


class Inbox:
    """The pipe through which one peer writes to this rank.

    Attributes:
        write_fd: for the peer to open, until :meth:`opened`.

    Raises:
        OSError: the system gives no pipe, or only a small one.
    """

    def __init__(self) -> None:
        self.fd, self.write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False
        self._close = weakref.finalize(self, os.close, self.write_fd)
        self._close.atexit = False
        if fcntl.fcntl(self.fd, fcntl.F_GETPIPE_SZ) < _PIPE_BYTES:
            raise OSError("this user has so many pipes that the next ones are small")
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._here: dict[Key, list[int]] = {}
        self._forgotten: set[Key] = set()
        self._lock = threading.Lock()

    def opened(self) -> None:
        """The peer has opened its end: from now on the pipe ends when the peer does."""
        self._close()

    def forget(self, key: Key) -> None:
        """This header is not wanted, now or when it comes."""
        if self._here.pop(key, None) is None:
            self._forgotten.add(key)

    def read(self) -> bool:
        """Take in what is there; False when there is nothing.

        Raises:
            ConnectionError: there is nothing and never will be: the peer is gone.
        """
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            raise ConnectionError("its process is gone, or has closed its communicator")
        for tag, number, low, num_bytes in _HEADER.iter_unpack(data):
            if (tag, number) in self._forgotten:
                self._forgotten.remove((tag, number))
            else:
                self._here[tag, number] = [number, low, num_bytes]
        return True

    def take(self, key: Key, timeout_s: float) -> list[int]:
        """Wait for a header.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._here.pop(key, None)
            if found is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"waited {timeout_s:g} s for what it has in its shared memory")
            try:
                with self._lock:
                    if key not in self._here and not self.read():
                        self._poll.poll(1e3 * min(left, _SLICE_S))
            except ConnectionError:
                _wait_for_reports(deadline)
                raise

    def look(self) -> None:
        """Take in what is there.

        Raises:
            ConnectionError: the peer is gone.
        """
        try:
            with self._lock:
                self.read()
        except ConnectionError:
            _wait_for_reports(time.monotonic() + _REPORT_S)
            raise


def _wait_for_reports(deadline: float) -> None:
    """A rank that closed its pipe may be about to say why it leaves."""
    until = min(deadline, time.monotonic() + _REPORT_S)
    while not reported()[0] and time.monotonic() < until:
        time.sleep(0.05)


class PipePost:
    """Headers through pipes.

    Args:
        inboxes: of each peer.
        fds: the ends of their pipes that this rank has opened; they are closed together with this object.
        timeout_s: of a wait.
    """

    def __init__(self, inboxes: dict[int, Inbox], fds: dict[int, int], timeout_s: float) -> None:
        self._inboxes, self._fds, self._timeout_s = inboxes, fds, timeout_s
        self._count = 0
        self._closings = [weakref.finalize(self, os.close, fd) for fd in fds.values()]
        for closing in self._closings:
            closing.atexit = False
        _posts.add(self)

    def exchange(self, key: Key, low: int, num_bytes: int) -> tuple[dict[int, Callable[[], list[int]]], list[Any]]:
        """See :class:`Post`."""
        self._count += 1
        if self._count % _DRAIN_EVERY == 0:  # those of collectives that nobody waited for
            for inbox in self._inboxes.values():
                with contextlib.suppress(ConnectionError):
                    while inbox.read():
                        pass
        header = _HEADER.pack(*key, low, num_bytes)
        for fd in self._fds.values():
            with contextlib.suppress(BrokenPipeError):  # the wait for what this peer sends will tell
                os.write(fd, header)
        waits: dict[int, Callable[[], list[int]]] = {}
        for peer, inbox in self._inboxes.items():
            waits[peer] = partial(inbox.take, key, self._timeout_s)
        return waits, []

    def forget(self, key: Key, peer: int) -> None:
        """See :class:`Post`."""
        self._inboxes[peer].forget(key)

    def look(self, peers: Sequence[int]) -> None:
        """See :meth:`Inbox.look`."""
        for peer in peers:
            self._inboxes[peer].look()

    def close(self) -> None:
        """Close this rank's ends of its peers' pipes."""
        for closing in self._closings:
            closing()


_posts: weakref.WeakSet[PipePost] = weakref.WeakSet()


def _after_fork() -> None:
    # A child that held these ends open would keep the peers from seeing that its parent is gone.
    for post in _posts:
        post.close()


os.register_at_fork(after_in_child=_after_fork)


def open_pipe(pid: int, fd: int) -> int:
    """The writing end of a pipe that another process has as ``fd``.

    Raises:
        OSError: it cannot be opened, or is no pipe.
    """
    path = f"/proc/{pid}/fd/{fd}"
    target = os.readlink(path)
    if not target.startswith("pipe:"):
        raise OSError(f"{path} is {target!r}, not a pipe")
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
