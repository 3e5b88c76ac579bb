"""The transport of groups whose ranks are all on one host: what they send goes through memory that they share.

For each message a rank copies its bytes into its own segment (``segments.py``), unless they lie there already
(:meth:`SharedTransport.room`), and sends every peer a *header*: where they are (``posts.py``). A peer that has the
header copies, or adds, straight out of that segment, and then marks the block as read in a segment of its own, where
the owner looks before it needs room. So issuing never waits, and the room needed is what is in flight.

A header has the tag that messages of :class:`~zoo.comm.transport.PairwiseTransport` would have: of ranks that make two
collectives in different order each waits for the other, up to the timeout. Tensors that are not on the CPU travel as
there altogether. All-reduces of some kilobytes go without headers (``small_sums.py``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zoo.comm.failures import RankFailedError
from zoo.comm.groups import timeout_of
from zoo.comm.handles import Pending
from zoo.comm.posts import GroupPost, Inbox, Key, PipePost, Post, open_pipe
from zoo.comm.segments import OwnSegment, PeerSegment, host_token
from zoo.comm.small_sums import SmallSums
from zoo.comm.transport import PairwiseTransport, Transport, add_in_rank_order, combine_in_rank_order

_DEFAULT_TIMEOUT_S = 1800.0
# Every rank reads what all others have: (N-1)·n bytes, where two legs would be 2(N-1)/N·n and another wait.
_MOST_READ_BYTES = 1 << 24
# What torch adds and compares on a CPU.
_REAL = frozenset((
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
))  # fmt: skip
_CARD_WORDS = 6  # whether there is a segment, the token of the host, pid, fd, two words of nonce; then fds of pipes

_log = logging.getLogger("zoo.comm")


class _Reading:
    """What one collective reads of its peers' blocks; dropped before that, it tells them that it never will."""

    def __init__(self, segment: OwnSegment, post: Post, key: Key, peers: list[int]) -> None:
        self._segment, self._post, self.key, self._unread = segment, post, key, list(peers)
        self._pid = os.getpid()

    def done(self, *peers: int) -> None:
        """The blocks of these peers are read."""
        number = self.key[1]
        self._segment.note_read(number, peers)
        for peer in peers:
            self._unread.remove(peer)
        if not self._unread:
            self._segment.finish(number)

    def __del__(self) -> None:
        if self._unread and os.getpid() == self._pid:  # a forked child has a copy, and no part in this
            for peer in self._unread:
                self._post.forget(self.key, peer)
            self.done(*self._unread)


class _Arrival:
    """A work: the header of a peer's block, and then what is to be done with it."""

    __slots__ = ("wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class SharedTransport(PairwiseTransport):
    """Collectives of the ranks of one host through shared memory. Made by :func:`share`.

    Sums are bitwise those of the pairwise transport, and all-reduces too are done in rank order. ``wait_s``: so long a
    rank waits for one that has not read what was sent too many collectives ago.
    """

    def __init__(
        self, group: Any, segment: OwnSegment, others: dict[int, PeerSegment], post: Post, *, wait_s: float,
        small: SmallSums | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group)
        self._wait_s = wait_s
        self._segment, self._others, self._post = segment, others, post
        self._next = 0  # number of the next block, the same on all ranks
        self._readers = [others[peer] for peer in self._peers]
        self._small = small

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str = "") -> Pending:
        """See :class:`~zoo.comm.transport.Transport`."""
        if not full.nbytes or not full.is_cpu:
            return super().all_gather(full, shard, label)
        full = full.data  # arriving bytes are no change that autograd counts, as with messages
        chunks = full.chunk(self._size)
        mine = chunks[self._rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        block, low, reading = self._lend("all_gather", full, label, mine.nbytes)
        block.copy_(mine)
        waits, works = self._post.exchange(reading.key, low, block.nbytes)

        def take(peer: int) -> None:
            chunks[peer].copy_(self._find(peer, waits[peer](), reading.key, mine.nbytes, full.dtype))
            reading.done(peer)

        return Pending([_Arrival(partial(take, peer)) for peer in self._peers] + works, None, self._peer_ranks)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float, label: str = "") -> Pending:
        """See :class:`~zoo.comm.transport.Transport`."""
        if not full.nbytes or not full.is_cpu:
            return super().reduce_scatter(full, out, scale, label)
        full = full.data
        n = full.numel() // self._size
        room = self._segment.room_of(full)
        but_own = (self._size - 1) * n * full.element_size()
        num_bytes = but_own if room is None else full.nbytes
        block, low, reading = self._lend("reduce_scatter", full, label, num_bytes, room)
        before = self._rank * n  # all chunks but this rank's own, in rank order
        if room is None:
            block[:before].copy_(full[:before])
            block[before:].copy_(full[before + n : self._size * n])
        waits, works = self._post.exchange(reading.key, low, num_bytes)
        parts = list(full.chunk(self._size))

        def take(peer: int) -> None:
            header = waits[peer]()
            whole = header[2] != but_own  # the peer's gradients lie there themselves
            theirs = self._find(peer, header, reading.key, full.nbytes if whole else but_own, full.dtype)
            place = self._rank - (peer < self._rank and not whole)
            parts[peer] = theirs[place * n : (place + 1) * n]

        def add() -> None:
            add_in_rank_order(parts, out, scale)
            reading.done(*self._peers)

        return Pending([_Arrival(partial(take, peer)) for peer in self._peers] + works, add, self._peer_ranks)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """See :class:`~zoo.comm.transport.Transport`. Done in rank order, in one leg: each rank reads all others'."""
        much = self._size > 3 and (self._size - 1) * tensor.nbytes > _MOST_READ_BYTES
        if not tensor.nbytes or not tensor.is_cpu or tensor.dtype not in _REAL or much:
            return super().all_reduce(tensor, op)
        own = tensor.data.view(-1)
        if self._small is not None and self._small.takes(own):
            return Pending([self._small.begin(self._tag(op, own, "small"), own, op)], None, self._peer_ranks)
        block, low, reading = self._lend(f"all_reduce {op}", own, "", own.nbytes)
        block.copy_(own)
        waits, works = self._post.exchange(reading.key, low, own.nbytes)
        parts = [own] * self._size

        def take(peer: int) -> None:
            parts[peer] = self._find(peer, waits[peer](), reading.key, own.nbytes, own.dtype)

        def finish() -> None:
            combine_in_rank_order(parts, own, op)
            reading.done(*self._peers)

        return Pending([_Arrival(partial(take, peer)) for peer in self._peers] + works, finish, self._peer_ranks)

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """See :class:`~zoo.comm.transport.Transport`."""
        try:
            return self._segment.room(num_bytes, self._readers) if num_bytes else None
        except OSError:  # it is copied then
            return None

    def _lend(
        self, op: str, full: torch.Tensor, label: str, num_bytes: int, at: int | None = None
    ) -> tuple[torch.Tensor, int, _Reading]:
        """A block to write, its offset, and what this rank will read of the others' blocks of the same number."""
        number = self._next
        low = self._segment.lend(number, num_bytes, self._readers, wait_s=self._wait_s, at=at)
        self._next += 1
        key = self._tag(f"shared {op}", full, label), number
        reading = _Reading(self._segment, self._post, key, self._peers)
        return self._segment.view(low, num_bytes, full.dtype), low, reading

    def _find(self, peer: int, header: list[int], key: Key, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The block that a peer has announced.

        Raises:
            RankFailedError: it is not the one that belongs here.
        """
        number = key[1]
        theirs, low, size = header
        found: ValueError | None = None
        if (theirs, size) == (number, num_bytes):
            try:
                return self._others[peer].view(low, num_bytes, dtype)
            except ValueError as error:
                found = error
        rank = self._peer_ranks[self._peers.index(peer)]
        raise RankFailedError(
            f"rank {rank} announced block {theirs} of {size} bytes at {low} of its shared memory, where block {number} "
            f"of {num_bytes} bytes was expected.", (rank,),
        ) from found  # fmt: skip


def share(transport: Transport | None) -> tuple[Transport | None, bool]:
    """The transport of a group that has ``transport`` now, and whether it goes through shared memory. Collective.

    It does where ``transport`` is pairwise and every rank can open the memory of every other: all are on one host, in
    one pid namespace, processes of one user. All ranks get the same answer.
    """
    if not isinstance(transport, PairwiseTransport) or isinstance(transport, SharedTransport):
        return transport, isinstance(transport, SharedTransport)
    asked = getattr(transport._group, "zoo_transport", None)
    if asked == "pairwise":  # of simulated ranks
        return transport, False
    found = make_shared(transport)
    return found, isinstance(found, SharedTransport)


def unshare(transport: Transport | None) -> Transport | None:
    """The transport without shared memory, whose blocks go away with what is in flight."""
    return PairwiseTransport(transport._group) if isinstance(transport, SharedTransport) else transport


def make_shared(transport: PairwiseTransport) -> PairwiseTransport:
    """A transport through shared memory, or ``transport`` itself where some rank cannot. Collective."""
    rank, size = transport._rank, transport._size
    peers = [peer for peer in range(size) if peer != rank]
    segment, inboxes, why = None, {}, ""
    card = torch.zeros(_CARD_WORDS + size, dtype=torch.int64)
    try:
        token = host_token()
        segment = OwnSegment(rank, size)
        inboxes = {peer: Inbox() for peer in peers}
        card[:_CARD_WORDS] = torch.tensor([1, token, *_address(segment)])
        for peer, inbox in inboxes.items():
            card[_CARD_WORDS + peer] = inbox.write_fd
    except OSError as error:
        segment, why = None, str(error)
    cards = _gather(transport, card, "shared memory")
    others: dict[int, PeerSegment] = {}
    fds: dict[int, int] = {}
    if segment is not None:
        try:
            for peer in peers:
                others[peer] = _open(cards[peer], cards[rank], size)
                fds[peer] = open_pipe(cards[peer][2], cards[peer][_CARD_WORDS + rank])
        except OSError as error:
            why = str(error)
    timeout = timeout_of(transport._group)
    wait_s = _DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
    pipes = PipePost(inboxes, fds, wait_s)
    fails = torch.tensor([int(bool(why))])
    failed = [peer for peer, (found,) in enumerate(_gather(transport, fails, "shared memory opened")) if found]
    if failed or segment is None:
        _log.info(
            "no shared memory for a group of %d ranks: rank(s) %s of it cannot open that of all others%s",
            size, failed, f" (here: {why})" if why else "",
        )  # fmt: skip
        return transport
    for inbox in inboxes.values():
        inbox.opened()
    simulated = hasattr(transport._group, "zoo_transport")
    post = GroupPost(transport._group, transport._peers) if simulated else pipes
    # Where simulated ranks take turns, one that waits here would wait for ever.
    if simulated:
        return SharedTransport(transport._group, segment, others, post, wait_s=0.0)
    small = SmallSums(rank, segment, others, pipes, transport._peer_ranks, wait_s)
    return SharedTransport(transport._group, segment, others, post, wait_s=wait_s, small=small)


def _address(segment: OwnSegment) -> tuple[int, int, int, int]:
    first, second = (int.from_bytes(segment.nonce[i : i + 8], "little", signed=True) for i in (0, 8))
    return os.getpid(), segment.fd, first, second


def _open(card: list[int], own: list[int], size: int) -> PeerSegment:
    there, token, pid, fd, first, second = card[:_CARD_WORDS]
    if not there or token != own[1]:
        raise OSError("another rank has none, or is on another host")
    nonce = b"".join(word.to_bytes(8, "little", signed=True) for word in (first, second))
    return PeerSegment(pid, fd, nonce, size)


def _gather(transport: PairwiseTransport, mine: torch.Tensor, label: str) -> list[list[int]]:
    everyone = torch.empty(transport._size * len(mine), dtype=torch.int64)
    transport.all_gather(everyone, mine, label).wait()
    rows: list[list[int]] = everyone.view(transport._size, -1).tolist()
    return rows
