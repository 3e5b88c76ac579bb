"""Memory that the ranks of one host share: each rank writes into a segment of its own, the others read there.

A segment is an anonymous file (memfd). It has no name, so that nothing is left behind however a process ends, and no
limit but the memory of the host. Other processes of the same user open it through /proc. Its layout:

    nonce        16 bytes, by which a peer sees that it opened the right file
    words        of each rank of the group, _NUM_WORDS 8-byte words: what this rank has read of that rank's blocks
    area         of small sums (small_sums.py)
    blocks       from a page boundary on, each at a multiple of 64 bytes

A rank writes to no segment but its own. The file only grows, and is sealed against shrinking: whatever a peer has found
inside of it stays readable.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from zoo.io import _native

_NAME = "zoo"
_NONCE_BYTES = 16
_WORDS_AT = 64
_NUM_WORDS = 1024
_PAGE = 4096
_ALIGN = 64
# What is larger is one of few, as a table's gradient: its pages are not kept for the next.
_KEPT_BYTES = 1 << 25
_PUNCH_HOLE_KEEP_SIZE = 3
# A file of this size takes no memory: a page of it begins to exist when it is first written.
_FIRST_BYTES = 1 << 26


def _fallocate(fd: int, mode: int, low: int, num_bytes: int) -> None:
    """Linux's call; where it fails the pages stay."""
    call = ctypes.CDLL(None).fallocate
    call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
    call(fd, mode, low, num_bytes)


_fence_lock = threading.RLock()


def _fence() -> None:
    """What was read before is read before anything is written afterwards: a lock released and taken again."""
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _begin_of_area(size: int) -> int:
    return -(-(_WORDS_AT + 8 * _NUM_WORDS * size) // _PAGE) * _PAGE


def _begin_of_blocks(size: int) -> int:
    return _begin_of_area(size) + -(-_native.small_sums_bytes(size)[0] // _PAGE) * _PAGE


def host_token() -> int:
    """A number (below 2**62) that processes have in common if they can name each other: one boot, one pid namespace.

    Raises:
        OSError: this system has none (it is not Linux).
    """
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        boot = file.read(64)
    return int.from_bytes(blake2b(boot + os.readlink("/proc/self/ns/pid").encode(), digest_size=8).digest(), "big") >> 2


class _Mapped:
    """A file of shared memory, as far as this process has mapped it.

    Args:
        fd: of the file; it is closed together with this object.
        size: ranks of the group.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self._area = _begin_of_area(size)
        self._begin = _begin_of_blocks(size)
        self._map()
        head = self._bytes[_WORDS_AT : _WORDS_AT + 8 * _NUM_WORDS * size]
        numbers: Any = head.numpy()
        self._words = memoryview(numbers).cast("Q")

    def _map(self) -> None:
        num_bytes, path = os.fstat(self.fd).st_size, f"/proc/self/fd/{self.fd}"
        try:
            self._bytes = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            self._num_bytes = num_bytes
        except RuntimeError as error:  # torch's word for it, where address space is limited
            raise OSError(f"{num_bytes} bytes of shared memory cannot be mapped: {error}") from error

    def view(self, low: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The block at ``low`` as (n,) elements.

        Raises:
            ValueError: there is no such block.
        """
        high = low + num_bytes
        if num_bytes >= 0 and high > self._num_bytes:
            self._map()  # the file has grown
        if low < self._begin or low % _ALIGN or num_bytes < 0 or high > self._num_bytes:
            raise ValueError(
                f"a block of {num_bytes} bytes at {low} is not in the shared memory of {self._num_bytes} bytes."
            )
        return self._bytes.narrow(0, low, num_bytes).view(dtype)

    def area(self) -> torch.Tensor:
        """The bytes of small sums."""
        return self._bytes[self._area : self._begin]

    def has_read(self, rank: int, number: int) -> bool:
        """Whether the owner of this segment has read block ``number`` of ``rank``, or never will."""
        found: int = self._words[rank * _NUM_WORDS + number % _NUM_WORDS]
        return found > number


class PeerSegment(_Mapped):
    """The segment of another rank, to read.

    Args:
        pid, fd, nonce: of that rank, as its :class:`OwnSegment` has them.
        size: ranks of the group.

    Raises:
        OSError: it cannot be opened, or it is another file than what was meant.
    """

    def __init__(self, pid: int, fd: int, nonce: bytes, size: int) -> None:
        path = f"/proc/{pid}/fd/{fd}"
        target = os.readlink(path)  # to open a file that is something else could have effects
        if not target.startswith(f"/memfd:{_NAME} "):
            raise OSError(f"{path} is {target!r}, not a segment of shared memory")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, opened).atexit = False
        found = os.fstat(opened)
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not stat.S_ISREG(found.st_mode) or not sealed or found.st_size < _begin_of_blocks(size):
            raise OSError(f"{path} is not the segment of a group of {size} ranks")
        if os.pread(opened, _NONCE_BYTES, 0) != nonce:
            raise OSError(f"{path} is the segment of another group")
        super().__init__(opened, size)


class OwnSegment(_Mapped):
    """This rank's segment: it lends blocks to its peers and takes them back when all of them have read.

    Blocks have the numbers of their collectives, which count up on all ranks alike. Free space is found first-fit from
    the beginning, so that the same pages are used again and again, and memory follows what is in flight.

    Args:
        rank, size: of the group.

    Attributes:
        nonce: 16 random bytes at the beginning of the file.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, rank: int, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, fd).atexit = False
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        os.ftruncate(fd, max(_FIRST_BYTES, _begin_of_blocks(size)))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(fd, self.nonce, 0)
        super().__init__(fd, size)
        self._rank = rank
        self._lent: dict[int, tuple[int, int]] = {}  # by number: begin and end of the block
        self._rooms: dict[int, tuple[int, int]] = {}  # by address: the same
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._unread: dict[int, None] = {}  # numbers of collectives that this rank has not read, in their order

    def room(self, num_bytes: int, peers: Sequence[_Mapped]) -> torch.Tensor:
        """(num_bytes,) memory of the segment as a storage of its own, whose content is sent without a copy.

        It is taken until that storage dies, and what was sent of it until all ``peers`` have read.

        Raises:
            OSError: there is no memory.
        """
        self._free_what_is_read(peers)
        low, high = self._find(num_bytes)
        memory: Any = self._bytes[low:high].numpy()
        address = self._bytes.data_ptr() + low
        self._rooms[address] = low, high
        rooms, refs, own = self._rooms, self._refs, weakref.ref(self)

        def leave(_: object) -> None:  # on whatever thread
            segment = own()
            if segment is not None:  # otherwise its file is closed
                segment._empty(rooms, address)
            del rooms[address], refs[address]

        refs[address] = weakref.ref(memory, leave)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def room_of(self, tensor: torch.Tensor) -> int | None:
        """The offset of a tensor that begins where a room does; None for others."""
        low, high = self._rooms.get(tensor.data_ptr(), (0, 0))
        return low if high - low >= max(tensor.nbytes, 1) else None

    def _free_what_is_read(self, peers: Sequence[_Mapped]) -> None:
        lent = self._lent
        for other in [n for n in lent if all(peer.has_read(self._rank, n) for peer in peers)]:
            self._empty(lent, other)
            del lent[other]

    def _empty(self, blocks: dict[int, tuple[int, int]], key: int) -> None:
        """A block is about to be left: if it is large, its pages take no memory until they are written to again.

        It is still taken, so that nobody writes there meanwhile.
        """
        low, high = blocks[key]
        if high - low <= _KEPT_BYTES:
            return
        held = [(held is blocks and k == key, b) for held in (self._lent, self._rooms) for k, b in list(held.items())]
        if not any(begin < high and low < end for is_this, (begin, end) in held if not is_this):
            low, high = -(-low // _PAGE) * _PAGE, high // _PAGE * _PAGE
            _fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, low, high - low)

    def _find(self, num_bytes: int) -> tuple[int, int]:
        """Begin and end of the first gap of this size; the file grows if there is none."""
        low = self._begin
        for begin, end in sorted([*self._lent.values(), *list(self._rooms.values())]):
            if begin - low >= num_bytes:
                break
            low = max(low, -(-end // _ALIGN) * _ALIGN)
        if low + num_bytes > self._num_bytes:
            os.ftruncate(self.fd, max(2 * self._num_bytes, low + num_bytes))
            self._map()
        return low, low + num_bytes

    def lend(
        self, number: int, num_bytes: int, peers: Sequence[_Mapped], *, wait_s: float = 0.0, at: int | None = None
    ) -> int:  # fmt: skip
        """Room for block ``number``: its offset. Blocks that all ``peers`` have read are free again.

        ``at``: it is there already, in what :meth:`room` gave. A peer that has not read what this rank sent so long
        ago is waited for: it may have issued that much itself, and need nothing more from here to read it.

        Raises:
            OSError: there is no memory.
            RuntimeError: more collectives are in flight than can be told apart.
        """
        lent = self._lent
        deadline = 0.0
        while True:
            self._free_what_is_read(peers)
            oldest = min(next(iter(lent), number), next(iter(self._unread), number))
            if number - oldest < _NUM_WORDS or oldest in self._unread:
                break
            deadline = deadline or time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                break
            time.sleep(1e-3)
        if number - oldest >= _NUM_WORDS:
            raise RuntimeError(
                f"{number - oldest} collectives were issued since one that some rank has not waited for; at most "
                f"{_NUM_WORDS} may be in flight: wait for handles, or drop them."
            )
        low = self._find(num_bytes)[0] if at is None else at
        lent[number] = low, low + num_bytes
        self._unread[number] = None
        return low

    def note_read(self, number: int, ranks: Sequence[int]) -> None:
        """Tell ``ranks`` that this one has read their blocks ``number``, or never will."""
        _fence()
        for rank in ranks:
            self._words[rank * _NUM_WORDS + number % _NUM_WORDS] = number + 1

    def finish(self, number: int) -> None:
        """This rank has told all ranks about their blocks ``number``."""
        self._unread.pop(number, None)

    @property
    def num_bytes_lent(self) -> int:
        """Bytes up to the end of the last room, or block that is not known to be read."""
        return max((end for _, end in (*self._lent.values(), *self._rooms.values())), default=self._begin) - self._begin
