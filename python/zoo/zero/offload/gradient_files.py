"""Reduced gradients on NVMe: written as backward makes them, read by the update."""

from __future__ import annotations

import contextlib
from collections import deque

import torch

from zoo import io
from zoo.zero.offload.errors import OffloadError
from zoo.zero.offload.scratch import Scratch, Shelf, round_up

IN_FLIGHT = 4
"""Gradients under way to the device before backward waits for the oldest."""


class GradientPark:
    """One region for each bucket; a write is finished before the same region is used again."""

    def __init__(self, scratch: Scratch, shelf: Shelf) -> None:
        self._scratch, self._shelf = scratch, shelf
        self._under_way: dict[int, io.Future] = {}
        self._lost: set[int] = set()
        self._order: deque[int] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a gradient that travels without a copy."""
        return self._scratch.pool.empty(numel, dtype=dtype)

    def put(self, region: int, gradient: torch.Tensor) -> None:
        """Begin writing; the tensor must not be changed any more."""
        self.forget(region)
        while len(self._order) >= IN_FLIGHT:
            self.settle(self._order[0])
        self._under_way[region] = self._shelf.write(region, gradient)
        self._order.append(region)

    def settle(self, region: int) -> None:
        """Wait for the write of a region, if one is under way."""
        future = self._under_way.pop(region, None)
        if future is not None:
            self._order.remove(region)
            self._lost.add(region)
            self._shelf.finish(future)
            self._lost.discard(region)

    def forget(self, region: int) -> None:
        """What the region holds is not needed any more."""
        if region in self._under_way:
            with contextlib.suppress(OffloadError):
                self.settle(region)
        self._lost.discard(region)

    def begin(self, region: int, into: torch.Tensor, start: int = 0) -> io.Future:
        """Begin reading elements [start, start + n) of a region."""
        self.settle(region)
        if region in self._lost:
            raise OffloadError("a reduced gradient was lost when the device failed; zero_grad() and go through the "
                               "backward again.")  # fmt: skip
        return self._shelf.read(region, into, start * into.itemsize)

    def finish(self, future: io.Future) -> None:
        """Wait for a read."""
        self._shelf.finish(future)

    def get(self, region: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of a region, in new memory."""
        tensor = self.empty(numel, dtype)
        self.finish(self.begin(region, tensor))
        return tensor

    @staticmethod
    def buffer_bytes(largest: int) -> int:
        """Host memory that gradients of at most ``largest`` bytes take on their way."""
        return (IN_FLIGHT + 2) * round_up(largest)
