"""A file whose writes nobody waits for: of reduced gradients, which backward makes and the update reads."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from zoo import io
from zoo.shard.offload.scratch import NvmeFile, round_up
from zoo.shard.offload.tiers import OffloadError

IN_FLIGHT = 4
"""Writes under way to the device before the next one waits for the oldest."""


class WriteBehind:
    """A store (:class:`~zoo.shard.roles.Store`) over the regions of ``nvme_file``.

    A write is finished before the same region is used again; what is written must not be changed any more.
    """

    def __init__(self, nvme_file: NvmeFile) -> None:
        self._nvme_file = nvme_file
        self._under_way: dict[int, io.Future] = {}
        self._lost: set[int] = set()
        self._order: deque[int] = deque()

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> None:
        """Begin writing at byte ``offset``; a failure shows when the region is read."""
        self.drop(region)
        while len(self._order) >= IN_FLIGHT:
            self._settle(self._order[0])
        self._under_way[region] = self._nvme_file.write(region, tensor, offset)
        self._order.append(region)

    def _settle(self, region: int) -> None:
        """Wait for the write of a region, if one is under way."""
        future = self._under_way.pop(region, None)
        if future is not None:
            self._order.remove(region)
            self._lost.add(region)
            self._nvme_file.finish(future)
            self._lost.discard(region)

    def drop(self, region: int) -> None:
        """What a region holds is needed no longer."""
        if region in self._under_way:
            with contextlib.suppress(OffloadError):
                self._settle(region)
        self._lost.discard(region)

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> io.Future:
        """Begin filling ``tensor`` from byte ``offset`` of a region."""
        self._settle(region)
        if region in self._lost:
            raise OffloadError("a reduced gradient was lost when the device failed; zero_grad() and go through the "
                               "backward again.")  # fmt: skip
        return self._nvme_file.read(region, tensor, offset)

    def finish(self, future: io.Future | None) -> None:
        """Wait for a read."""
        if future is not None:
            self._nvme_file.finish(future)

    @staticmethod
    def buffer_bytes(largest: int) -> int:
        """Host memory that what is written, of at most ``largest`` bytes each, takes on its way."""
        return (IN_FLIGHT + 2) * round_up(largest)
