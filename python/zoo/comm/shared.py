"""The transport of groups whose ranks are all on one host: bytes go through shared memory, and who waits for whom is
told by the same small messages as between hosts.

For each large message a rank copies its bytes into its own segment (``segments.py``) and sends every peer a *header*:
where they are. A peer that has the header copies, or adds, straight out of that segment, and then marks the block as
read in a segment of its own, where the owner looks before it needs room. So issuing never waits, and the room needed is
what is in flight.

Headers have tags as the messages of :class:`~zoo.comm.transport.PairwiseTransport`, and are received when the operation
is issued. Order, timeouts and lost peers therefore show just as there: a header that does not come is a message that
does not come. Small messages, and tensors that are not on the CPU, travel as there altogether.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from zoo.comm.failures import RankFailedError
from zoo.comm.handles import Pending
from zoo.comm.segments import OwnSegment, PeerSegment, host_token
from zoo.comm.transport import PairwiseTransport, Transport, add_in_rank_order

LEAST_BYTES = 1 << 16
"""From this many bytes for each peer on, a message goes through shared memory."""

_HEADER_WORDS = 3  # the number of the collective, the offset of the block, its bytes
_CARD_WORDS = 6  # whether there is a segment, the token of the host, pid, fd, two words of nonce

_log = logging.getLogger("zoo.comm")


class _Reading:
    """What one collective reads of its peers' blocks; dropped before that, it tells them that it never will."""

    def __init__(self, segment: OwnSegment, number: int, peers: list[int]) -> None:
        self._segment, self.number, self._unread = segment, number, list(peers)
        self._pid = os.getpid()

    def done(self, *peers: int) -> None:
        """The blocks of these peers are read."""
        self._segment.note_read(self.number, peers)
        for peer in peers:
            self._unread.remove(peer)
        if not self._unread:
            self._segment.finish(self.number)

    def __del__(self) -> None:
        if self._unread and os.getpid() == self._pid:  # a forked child has a copy, and no part in this
            self.done(*self._unread)


class _Arrival:
    """A work: the header of a peer's block, and then what is to be done with it."""

    __slots__ = ("_take", "_work")

    def __init__(self, work: Any, take: Callable[[], None]) -> None:
        self._work, self._take = work, take

    def wait(self) -> None:
        self._work.wait()
        self._take()


class SharedTransport(PairwiseTransport):
    """Collectives of the ranks of one host, large ones through shared memory. Made by :func:`share`.

    The sums are bitwise those of the pairwise transport.
    """

    def __init__(self, group: Any, segment: OwnSegment, others: dict[int, PeerSegment], least_bytes: int) -> None:
        super().__init__(group)
        self._segment, self._others, self._least_bytes = segment, others, least_bytes
        self._next = 0  # number of the next block, the same on all ranks
        self._readers = [others[peer] for peer in self._peers]

    def _small(self, full: torch.Tensor) -> bool:
        return full.nbytes < self._least_bytes * self._size or not full.is_cpu

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str = "") -> Pending:
        """See :class:`~zoo.comm.transport.Transport`."""
        if self._small(full):
            return super().all_gather(full, shard, label)
        full = full.data  # arriving bytes are no change that autograd counts, as with messages
        chunks = full.chunk(self._size)
        mine = chunks[self._rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        block, low, reading = self._lend(mine.nbytes, full.dtype)
        block.copy_(mine)
        headers, works = self._announce(reading, self._tag("shared all_gather", full, label), low, block.nbytes)

        def taking(peer: int) -> Callable[[], None]:
            def take() -> None:
                chunks[peer].copy_(self._find(peer, headers[peer], reading.number, mine.nbytes, full.dtype))
                reading.done(peer)

            return take

        for i, peer in enumerate(self._peers):
            works[i] = _Arrival(works[i], taking(peer))
        return Pending(works, None, self._peer_ranks)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float, label: str = "") -> Pending:
        """See :class:`~zoo.comm.transport.Transport`."""
        if self._small(full):
            return super().reduce_scatter(full, out, scale, label)
        full = full.data
        n = full.numel() // self._size
        block, low, reading = self._lend((self._size - 1) * n * full.element_size(), full.dtype)
        before = self._rank * n  # all chunks but this rank's own, in rank order
        block[:before].copy_(full[:before])
        block[before:].copy_(full[before + n : self._size * n])
        headers, works = self._announce(reading, self._tag("shared reduce_scatter", full, label), low, block.nbytes)

        def add() -> None:
            parts = list(full.chunk(self._size))
            for peer in self._peers:
                place = self._rank - (peer < self._rank)
                theirs = self._find(peer, headers[peer], reading.number, block.nbytes, full.dtype)
                parts[peer] = theirs[place * n : (place + 1) * n]
            add_in_rank_order(parts, out, scale)
            reading.done(*self._peers)

        return Pending(works, add, self._peer_ranks)

    def _lend(self, num_bytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, int, _Reading]:
        """A block to write, its offset, and what this rank will read of the others' blocks of the same number."""
        number = self._next
        low = self._segment.lend(number, num_bytes, self._readers)
        self._next += 1
        return self._segment.view(low, num_bytes, dtype), low, _Reading(self._segment, number, self._peers)

    def _announce(
        self, reading: _Reading, tag: int, low: int, num_bytes: int
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:  # fmt: skip
        """Send every peer the header of this rank's block; returns theirs, by peer, and the works of both."""
        group, header = self._group, torch.tensor([reading.number, low, num_bytes])
        headers = {peer: torch.empty(_HEADER_WORDS, dtype=torch.int64) for peer in self._peers}
        works = [group.recv([headers[peer]], peer, tag) for peer in self._peers]
        works += [group.send([header], peer, tag) for peer in self._peers]
        return headers, works

    def _find(
        self, peer: int, header: torch.Tensor, number: int, num_bytes: int, dtype: torch.dtype
    ) -> torch.Tensor:  # fmt: skip
        """The block that a peer has announced.

        Raises:
            RankFailedError: it is not the one that belongs here.
        """
        theirs, low, size = header.tolist()
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
    found = make_shared(transport, LEAST_BYTES if asked is None else 1)
    return found, isinstance(found, SharedTransport)


def unshare(transport: Transport | None) -> Transport | None:
    """The transport without shared memory, whose blocks go away with what is in flight."""
    return PairwiseTransport(transport._group) if isinstance(transport, SharedTransport) else transport


def make_shared(transport: PairwiseTransport, least_bytes: int) -> PairwiseTransport:
    """A transport through shared memory, or ``transport`` itself where some rank cannot. Collective.

    Args:
        transport: that the group has now.
        least_bytes: for each peer, from which on a message goes through shared memory; the same on all ranks.
    """
    rank, size = transport._rank, transport._size
    segment, why = None, ""
    card = torch.zeros(_CARD_WORDS, dtype=torch.int64)
    try:
        token = host_token()
        segment = OwnSegment(rank, size)
        card[:] = torch.tensor([1, token, *_address(segment)])
    except OSError as error:
        why = str(error)
    cards = _gather(transport, card, "shared memory")
    others: dict[int, PeerSegment] = {}
    if segment is not None:
        try:
            others = {peer: _open(cards[peer], cards[rank], size) for peer in range(size) if peer != rank}
        except OSError as error:
            why = str(error)
    fails = torch.tensor([int(bool(why))])
    failed = [peer for peer, (found,) in enumerate(_gather(transport, fails, "shared memory opened")) if found]
    if failed or segment is None:
        _log.info(
            "no shared memory for a group of %d ranks: rank(s) %s of it cannot open that of all others%s",
            size, failed, f" (here: {why})" if why else "",
        )  # fmt: skip
        return transport
    return SharedTransport(transport._group, segment, others, least_bytes)


def _address(segment: OwnSegment) -> tuple[int, int, int, int]:
    first, second = (int.from_bytes(segment.nonce[i : i + 8], "little", signed=True) for i in (0, 8))
    return os.getpid(), segment.fd, first, second


def _open(card: list[int], own: list[int], size: int) -> PeerSegment:
    there, token, pid, fd, first, second = card
    if not there or token != own[1]:
        raise OSError("another rank has none, or is on another host")
    nonce = b"".join(word.to_bytes(8, "little", signed=True) for word in (first, second))
    return PeerSegment(pid, fd, nonce, size)


def _gather(transport: PairwiseTransport, mine: torch.Tensor, label: str) -> list[list[int]]:
    everyone = torch.empty(transport._size * len(mine), dtype=torch.int64)
    transport.all_gather(everyone, mine, label).wait()
    rows: list[list[int]] = everyone.view(transport._size, -1).tolist()
    return rows
