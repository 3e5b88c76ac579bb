"""Ranks that run different units, or a unit a different number of times: stage 3 by voting.

At stage 3 a unit is gathered from all ranks, so that all ranks have to run the same units in the same order; a rank
that takes another way through the model would wait for the others for ever. With ``divergent=True`` nobody gathers
alone. Wherever a rank needs a bucket it votes, and so do all others at their next need:

    vote = min over ranks of (index of the bucket needed, or DONE)

All ranks give their shard of the bucket that won; those who need another one vote again. ``step()`` votes DONE until
all ranks do, so that nobody leaves while another one still needs shards, and reduces all gradients then, with zeros
from those who have none. Collectives of the user between two steps need :meth:`GatherVotes.settle` first.

A vote is an all-reduce of 8 bytes that is waited for, one for each bucket that any rank needs; nothing is gathered
ahead, and gradients stay whole on each rank until ``step()``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.comm import Communicator
from zoo.shard.buckets import Bucket
from zoo.shard.parameters import Presence

DONE = 2**62


class GatherVotes:
    """Where the ranks of a model agree on which bucket to gather.

    Args:
        comm: all ranks of the model.
        buckets: all of them, in order.
    """

    def __init__(self, comm: Communicator, buckets: Sequence[Bucket]) -> None:
        self._comm, self._buckets = comm, buckets

    def unshard(self, bucket: Bucket) -> None:
        """Gather ``bucket``, after those that other ranks need first."""
        while (chosen := self._all_reduce(bucket.index, "min")) != bucket.index:
            self._serve(self._buckets[chosen])
        bucket.parameters.start()

    def settle(self) -> None:
        """Serve the others until no rank needs anything. Every rank calls it, before anything else is collective."""
        while (chosen := self._all_reduce(DONE, "min")) != DONE:
            self._serve(self._buckets[chosen])

    def any(self, flag: bool) -> bool:
        """Whether some rank says so. Collective, on ranks that have settled."""
        return self._all_reduce(int(flag), "max") > 0

    def _serve(self, bucket: Bucket) -> None:
        parameters = bucket.parameters
        if parameters.presence is Presence.UNSHARDING:
            bucket.executor.wait(bucket)
        if parameters.live:
            parameters.give()
            return
        parameters.start()
        bucket.executor.wait(bucket)
        if not bucket.active:
            bucket.executor.reshard(bucket)

    def _all_reduce(self, value: int, op: str) -> int:
        number = torch.tensor([value], dtype=torch.int64, device=self._buckets[0].device)
        self._comm.all_reduce(number, op).wait()
        return int(number)
