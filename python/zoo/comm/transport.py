"""How a collective travels: through the backend's own collectives, or as pairwise messages.

gloo implements reduce-scatter as a full all-reduce and stages all-gather in a temporary (torch 2.11 to 2.15): on two
ranks and 12.6 MB that costs 8.6 and 4.8 ms of CPU time where direct messages cost 2.8 and 2.6. The pairwise transport
sends (N-1)/N of the message from each rank, receives in place, and adds in rank order, so its sums do not depend on
which rank computes them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from zoo.comm.buffers import is_known, sendable
from zoo.comm.handles import Pending, dropped_of

# Messages of the pairwise collectives have tags from here on, a user's send and receive have small ones. The lower bits
# are the number of the collective on its group and a fingerprint of it: of two collectives in different order on two
# ranks, and of two different ones at the same place, no message meets one of the other.
_TAGS = 1 << 30
_NUMBER_BITS, _PRINT_BITS = 16, 14

# Collectives are numbered for each group, whoever makes them: several communicators may share one.
_numbers: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()


REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""What an all-reduce can do, and torch's name of it."""
_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Transport(Protocol):
    """The collectives whose route depends on the backend. Chunk r of a full buffer belongs to group rank r.

    ``label`` says what travels: the same on all ranks.
    """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str = "") -> Pending:
        """Fill ``full`` (N*n,) with every rank's ``shard`` (n,); ``shard`` may be this rank's chunk of ``full``."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float, label: str = "") -> Pending:
        """``out`` (n,) = scale * sum over ranks of this rank's chunk of ``full``; ``out`` may be that chunk."""

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """``tensor`` = ``op`` over ranks, in place; ``op`` is one of :data:`REDUCE_OPS`."""

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """(num_bytes,) uint8 memory for a ``full`` that is then reduced without a copy; None where there is none.

        What was reduced from it must not change until the last tensor of this memory is dead.
        """


class NativeTransport:
    """The backend's own collectives (nccl, and simulated ranks)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str = "") -> Pending:
        """See :class:`Transport`."""
        return Pending([dist.all_gather_into_tensor(full, shard, group=self._group, async_op=True)])

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float, label: str = "") -> Pending:
        """See :class:`Transport`."""
        work = dist.reduce_scatter_tensor(out, full, group=self._group, async_op=True)
        return Pending([work], (lambda: _scale(out, scale)) if scale != 1.0 else None)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """See :class:`Transport`."""
        return _of_backend(self._group, tensor, op)

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """See :class:`Transport`."""
        return None


class PairwiseTransport:
    """Direct messages between every two ranks: for gloo on CPU tensors."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group if group is not None else dist.group.WORLD
        self._rank = dist.get_rank(self._group)
        self._size = dist.get_world_size(self._group)
        # Everyone starts with another peer, so that no rank is asked by all the others at once.
        self._peers = [(self._rank + k) % self._size for k in range(1, self._size)]
        ranks = dist.get_process_group_ranks(self._group)
        self._peer_ranks = [ranks[peer] for peer in self._peers]
        self._numbers = _numbers.setdefault(self._group, itertools.count())
        self._dropped = dropped_of(self._group)
        self._prints: dict[tuple[str, int, torch.dtype, str], int] = {}

    def _tag(self, op: str, full: torch.Tensor, label: str) -> int:
        """The tag of all messages of the next collective of this group."""
        key = op, full.numel(), full.dtype, label
        found = self._prints.get(key)
        if found is None:
            found = self._prints[key] = zlib.crc32(repr(key).encode()) % (1 << _PRINT_BITS)
        return _TAGS | next(self._numbers) % (1 << _NUMBER_BITS) << _PRINT_BITS | found

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, label: str = "") -> Pending:
        """See :class:`Transport`."""
        chunks = full.chunk(self._size)
        mine = chunks[self._rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        group, tag = self._group, self._tag("all_gather", full, label)
        works = [group.recv([sendable(chunks[peer])], peer, tag) for peer in self._peers]
        works += [group.send([sendable(shard)], peer, tag) for peer in self._peers]
        return Pending(works, None, self._peer_ranks, dropped=self._dropped)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float, label: str = "") -> Pending:
        """See :class:`Transport`."""
        chunks = full.chunk(self._size)
        received = full.new_empty(self._size - 1, out.numel())
        parts: list[torch.Tensor] = list(chunks)
        for slot, peer in enumerate(self._peers):
            parts[peer] = received[slot]
        group, tag = self._group, self._tag("reduce_scatter", full, label)
        works = [group.recv([sendable(parts[peer])], peer, tag) for peer in self._peers]
        works += [group.send([sendable(chunks[peer])], peer, tag) for peer in self._peers]
        return Pending(works, lambda: add_in_rank_order(parts, out, scale), self._peer_ranks, dropped=self._dropped)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """See :class:`Transport`."""
        return _of_backend(self._group, tensor, op)

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """See :class:`Transport`."""
        return None


def add_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    """``out`` = scale * (((g0 + g1) + g2) + ...): the same order on whichever rank the chunk lives."""
    combine_in_rank_order(parts, out, "sum")
    _scale(out, scale)


def combine_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """``out`` = op(op(op(g0, g1), g2), ...), of two parts or more; ``op`` is one of :data:`REDUCE_OPS`."""
    # `out` may be one of the parts: only the last operation writes it.
    combine = _ELEMENTWISE[op]
    total = parts[0]
    for i, part in enumerate(parts[1:-1]):
        total = combine(total, part, out=total) if i else combine(total, part)
    combine(total, parts[-1], out=out)


def _of_backend(group: Any, tensor: torch.Tensor, op: str) -> Pending:
    if not is_known(tensor.dtype):
        raise ValueError(
            f"all_reduce got {tensor.dtype}, of which backends make no sums; give a dtype such as float32 or int32."
        )
    return Pending([dist.all_reduce(tensor, REDUCE_OPS[op], group=group, async_op=True)])


def _scale(out: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        out.mul_(scale)


def choose_transport(group: Any, backend: str) -> Transport:
    """The transport for a process group of this backend; a group that has a ``zoo_transport`` says itself which."""
    asked = getattr(group if group is not None else dist.group.WORLD, "zoo_transport", None)
    pairwise = backend == "gloo" if asked is None else asked in ("pairwise", "shared")
    return PairwiseTransport(group) if pairwise else NativeTransport(group)
