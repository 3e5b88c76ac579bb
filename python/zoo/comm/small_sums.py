"""All-reduces of a few kilobytes between processes of one host: ``zoo_io::small_sums``, in memory that they share.

A tensor-parallel model sends two sums for each layer of each token: some kilobytes, which every rank waits for at once.
Between processes that are awake such a sum makes no system call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from zoo.comm.failures import RankFailedError, explained
from zoo.io import _native

if TYPE_CHECKING:
    from zoo.comm.posts import PipePost
    from zoo.comm.segments import OwnSegment, PeerSegment

_SLICE_S = 0.2  # so long nobody looks whether the peer is still there
_, MOST_BYTES, _SLOTS = _native.small_sums_bytes(1)
_DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.int64: "int64"}


class SmallSums:
    """Those of one group, as one rank sees them.

    Args:
        rank: in the group.
        own, others: segments of shared memory, which have an area for this.
        post: tells whether a peer is gone.
        ranks: the global rank of each peer.
        wait_s: so long a rank waits for another.
    """

    def __init__(
        self, rank: int, own: OwnSegment, others: dict[int, PeerSegment], post: PipePost, ranks: Sequence[int],
        wait_s: float,
    ) -> None:  # fmt: skip
        self.peers = sorted(others)
        self.ranks, self.post, self.wait_s = ranks, post, wait_s
        areas = {rank: own.area(), **{peer: segment.area() for peer, segment in others.items()}}
        self._memory = list(areas.values())
        self.native = _native.SmallSums([areas[each].data_ptr() for each in sorted(areas)], rank)
        self._flying: dict[int, ref[SmallSum]] = {}
        self._last = 0

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether such a tensor, of the CPU and not empty, is summed here: all ranks decide alike."""
        return tensor.nbytes <= MOST_BYTES and tensor.dtype in _DTYPES

    def begin(self, tag: int, tensor: torch.Tensor, op: str) -> SmallSum:
        """Show this rank's part to its peers. A rank has at most as many in flight as there are slots: beyond that the
        oldest is completed first, so that a peer never waits here for a slot while this rank waits for its later part.

        Raises:
            RuntimeError: a peer did not read its part of one so long ago.
        """
        while self._flying and (oldest := next(iter(self._flying))) <= self._last - _SLOTS:
            known = self._flying.pop(oldest, None)  # None: it was dropped this moment
            work = known() if known is not None else None
            if work is not None:
                work.wait()
        address, num_bytes = tensor.data_ptr(), tensor.nbytes
        number = self.native.post(tag, address, num_bytes)
        deadline = 0.0
        while number is None:
            deadline = deadline or time.monotonic() + self.wait_s
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "too many small all-reduces were issued since one that some rank has not waited for: wait for "
                    "handles, or drop them."
                )
            self.post.look(self.peers)
            time.sleep(1e-4)
            number = self.native.post(tag, address, num_bytes)
        self._last = number + 1
        found = SmallSum(self, number, tag, tensor, op)
        self._flying[number] = ref(found)
        return found

    def wait_for(self, number: int, peer: int) -> None:
        """Until this peer's part is there.

        Raises:
            ConnectionError: the peer is gone.
            TimeoutError: it did not come.
        """
        deadline = 0.0
        while not self.native.wait(number, peer, _SLICE_S):
            deadline = deadline or time.monotonic() + self.wait_s - _SLICE_S
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {self.wait_s:g} s for its part of a sum")
            self.post.look([peer])

    def finished(self, number: int) -> None:
        """Nothing more is read of this sum here."""
        self.native.finish(number)
        self._flying.pop(number, None)


class SmallSum:
    """A sum in flight; dropped before its wait, it tells the peers that it never will be read here."""

    __slots__ = ("__weakref__", "_number", "_op", "_pid", "_sums", "_tag", "_tensor")

    def __init__(self, sums: SmallSums, number: int, tag: int, tensor: torch.Tensor, op: str) -> None:
        self._sums, self._number, self._tag, self._op = sums, number, tag, op
        self._tensor: torch.Tensor | None = tensor
        self._pid = os.getpid()

    def wait(self) -> None:
        """Wait for the parts of all peers, and write the sum.

        Raises:
            RankFailedError: a peer is gone, or made another collective.
        """
        tensor, sums, number = self._tensor, self._sums, self._number
        if tensor is None:
            return
        for peer, rank in zip(sums.peers, sums.ranks, strict=True):
            try:
                sums.wait_for(number, peer)
            except (ConnectionError, TimeoutError) as error:
                raise explained(error, rank) from error
        dtype = _DTYPES[tensor.dtype]
        other: Any = sums.native.combine(number, self._tag, dtype, self._op, tensor.data_ptr(), tensor.nbytes)
        self._tensor = None
        sums.finished(number)
        if other is not None:
            peer, _, num_bytes = other
            rank = sums.ranks[sums.peers.index(peer)]
            raise RankFailedError(
                f"rank {rank} made another collective where this rank made an all_reduce[{self._op}] of "
                f"{tensor.numel()} {dtype} ({tensor.nbytes} bytes; there: {num_bytes}): all ranks of a group have to "
                "make the same ones in the same order. A communicator with check=True tells which.", (rank,),
            )  # fmt: skip

    def __del__(self) -> None:
        if self._tensor is not None and os.getpid() == self._pid:  # a forked child has a copy, and no part in this
            self._sums.finished(self._number)
