"""Reduced gradients on NVMe: written as backward makes them, read by the update."""

from __future__ import annotations

from collections import deque

import torch

from zoo.io import Future
from zoo.zero.offload.scratch import Scratch, Shelf

IN_FLIGHT = 4
"""Gradients under way to the device before backward waits for the oldest."""


class GradientPark:
    """One region for each bucket; a write is finished before the same region is used again."""

    def __init__(self, scratch: Scratch, shelf: Shelf) -> None:
        self._scratch, self._shelf = scratch, shelf
        self._under_way: dict[int, Future] = {}
        self._order: deque[int] = deque()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a gradient that travels without a copy."""
        return self._scratch.pool.empty(numel, dtype=dtype)

    def put(self, region: int, gradient: torch.Tensor) -> None:
        """Begin writing; the tensor must not be changed any more."""
        self.settle(region)
        while len(self._order) >= IN_FLIGHT:
            self.settle(self._order[0])
        self._under_way[region] = self._shelf.write(region, gradient)
        self._order.append(region)

    def settle(self, region: int) -> None:
        """Wait for the write of a region, if one is under way."""
        future = self._under_way.pop(region, None)
        if future is not None:
            self._order.remove(region)
            self._shelf.finish(future)

    def begin(self, region: int, into: torch.Tensor, start: int = 0) -> Future:
        """Begin reading elements [start, start + n) of a region."""
        self.settle(region)
        return self._shelf.read(region, into, start * into.itemsize)

    def finish(self, future: Future) -> None:
        """Wait for a read."""
        self._shelf.finish(future)

    def get(self, region: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of a region, in new memory."""
        tensor = self.empty(numel, dtype)
        self.finish(self.begin(region, tensor))
        return tensor
