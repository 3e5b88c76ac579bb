"""How a collective travels: through the backend's own collectives, or as pairwise messages.

gloo implements reduce-scatter as a full all-reduce and stages all-gather in a temporary (torch 2.6 to 2.15): on two
ranks and 12.6 MB that costs 8.6 and 4.8 ms of CPU time where direct messages cost 2.8 and 2.6. The pairwise transport
sends (N-1)/N of the message from each rank, receives in place, and adds in rank order, so its sums do not depend on
which rank computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

# Messages of the pairwise collectives carry a tag of their own, so that they never meet a user's send and receive.
_TAG = 0x200


class Handle(Protocol):
    """A collective in flight. ``wait`` returns when the result is in place; calling it again does nothing."""

    def wait(self) -> None:
        """Block until this rank's part is complete (on CUDA: until the current stream will see it)."""


class _Done:
    def wait(self) -> None:
        return None


DONE: Handle = _Done()


class Pending:
    """Works to wait for, then a function to run once (the additions and scaling after the last message)."""

    __slots__ = ("_after", "_works")

    def __init__(self, works: list[Any], after: Callable[[], None] | None = None) -> None:
        self._works = works
        self._after = after

    def wait(self) -> None:
        """Wait for every work, then run the final function."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        after, self._after = self._after, None
        if after is not None:
            after()


class Transport(Protocol):
    """The two collectives whose route depends on the backend. Chunk r of a full buffer belongs to group rank r."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Handle:
        """Fill ``full`` (N*n,) with every rank's ``shard`` (n,); ``shard`` may be this rank's chunk of ``full``."""

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float) -> Handle:
        """``out`` (n,) = scale * sum over ranks of this rank's chunk of ``full``; ``out`` may be that chunk."""


class NativeTransport:
    """The backend's own collectives (nccl, and simulated ranks)."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Handle:
        """See :class:`Transport`."""
        return Pending([dist.all_gather_into_tensor(full, shard, group=self._group, async_op=True)])

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float) -> Handle:
        """See :class:`Transport`."""
        work = dist.reduce_scatter_tensor(out, full, group=self._group, async_op=True)
        return Pending([work], (lambda: _scale(out, scale)) if scale != 1.0 else None)


class PairwiseTransport:
    """Direct messages between every two ranks: for gloo on CPU tensors."""

    def __init__(self, group: Any) -> None:
        self._group: Any = group if group is not None else dist.group.WORLD
        self._rank = dist.get_rank(self._group)
        self._size = dist.get_world_size(self._group)
        # Everyone starts with another peer, so that no rank is asked by all the others at once.
        self._peers = [(self._rank + k) % self._size for k in range(1, self._size)]

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Handle:
        """See :class:`Transport`."""
        chunks = full.chunk(self._size)
        mine = chunks[self._rank]
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        group = self._group
        works = [group.recv([chunks[peer]], peer, _TAG) for peer in self._peers]
        works += [group.send([shard], peer, _TAG) for peer in self._peers]
        return Pending(works)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, scale: float) -> Handle:
        """See :class:`Transport`."""
        chunks = full.chunk(self._size)
        received = full.new_empty(self._size - 1, out.numel())
        parts: list[torch.Tensor] = list(chunks)
        for slot, peer in enumerate(self._peers):
            parts[peer] = received[slot]
        group = self._group
        works = [group.recv([parts[peer]], peer, _TAG) for peer in self._peers]
        works += [group.send([chunks[peer]], peer, _TAG) for peer in self._peers]
        return Pending(works, lambda: _add_in_rank_order(parts, out, scale))


def _add_in_rank_order(parts: list[torch.Tensor], out: torch.Tensor, scale: float) -> None:
    # The same order on whichever rank the chunk lives: ((g0 + g1) + g2) + ... `out` may be one of the parts, so the
    # running sum stays in a received buffer and only the last addition writes `out`.
    total = parts[0]
    for part in parts[1:-1]:
        total = torch.add(total, part)
    torch.add(total, parts[-1], out=out)
    _scale(out, scale)


def _scale(out: torch.Tensor, scale: float) -> None:
    if scale != 1.0:
        out.mul_(scale)


def choose_transport(group: Any, backend: str) -> Transport:
    """The transport for a process group of this backend."""
    return PairwiseTransport(group) if backend == "gloo" else NativeTransport(group)
