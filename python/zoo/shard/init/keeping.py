"""Where parts live that are not in memory, while it is not known yet how large the model will be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Protocol

import torch

from zoo.shard.offload.scratch import NvmeFile, Scratch, round_up

_SMALLEST_FILE = 2**26
_LARGEST_STEP = 2**30


class ParamSwapper(Protocol):
    """Keeps the parts of an Init outside of memory: what ``Init(param_swapper=)`` takes.

    Init calls it on each rank for the parts of that rank alone, from the thread that builds the model. A key is a
    number that is not used again after ``drop``. What it raises ends the construction.
    """

    def swap_out(self, key: int, values: torch.Tensor) -> None:
        """Keep (n,) ``values``, on the CPU, under ``key``, in the place of what was there; when it returns they are
        written or copied."""

    def swap_in(self, key: int, out: torch.Tensor) -> None:
        """Fill (n,) ``out``, on the CPU, with what ``key`` holds; it is there when this returns."""

    def drop(self, key: int) -> None:
        """What ``key`` holds is needed no longer."""


class Files:
    """A store in unnamed files under ``folder``, which grow by a step at a time."""

    def __init__(self, scratch: Scratch, folder: Path | None) -> None:
        self._scratch, self._folder = scratch, folder
        self._places: list[tuple[NvmeFile, int]] = []  # by region: a file and where it begins there
        self._used = self._total = 0
        self._nvme_file = self._grow(1)  # a folder that cannot be used is told before the model is built

    def _grow(self, num_bytes: int) -> NvmeFile:
        step = min(max(self._total, _SMALLEST_FILE), _LARGEST_STEP)
        made = self._scratch.nvme_file(self._folder, "parameters being made", [max(num_bytes, step)])
        self._total, self._used = self._total + made.num_bytes, 0
        return made

    def add(self, num_bytes: int) -> int:
        """A new region."""
        need = round_up(num_bytes)
        if self._used + need > self._nvme_file.num_bytes:
            self._nvme_file = self._grow(need)
        self._places.append((self._nvme_file, self._used))
        self._used += need
        return len(self._places) - 1

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        nvme_file, base = self._places[region]
        return nvme_file, nvme_file.read(0, tensor, base + offset, urgent=urgent)

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        nvme_file, base = self._places[region]
        return nvme_file, nvme_file.write(0, tensor, base + offset, urgent=urgent)

    def finish(self, future: Any) -> None:
        """See :class:`~zoo.shard.roles.Store`."""
        nvme_file, operation = future
        nvme_file.finish(operation)

    def drop(self, region: int) -> None:
        """A region is needed no longer. Its space is free when the process ends."""


class Swapped:
    """A store with a swapper. Regions are its keys, and are read and written whole."""

    def __init__(self, swapper: ParamSwapper) -> None:
        self._swapper, self._keys = swapper, itertools.count()

    def add(self, num_bytes: int) -> int:
        """A new region."""
        return next(self._keys)

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        self._swapper.swap_in(region, tensor)

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """See :class:`~zoo.shard.roles.Store`."""
        self._swapper.swap_out(region, tensor)

    def finish(self, future: Any) -> None:
        """It is done already."""

    def drop(self, region: int) -> None:
        """A region is needed no longer."""
        self._swapper.drop(region)
