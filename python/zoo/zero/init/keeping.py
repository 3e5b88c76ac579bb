"""Where the shards of a model live before an optimizer takes them: device, host memory or NVMe."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Protocol

import torch

from zoo.io import AioConfig, Handle
from zoo.zero.offload.scratch import Scratch, Shelf, round_up

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


class Kept:
    """This rank's elements of one parameter: (n,) in memory, a region of a file, or with a swapper."""

    __slots__ = ("__weakref__", "_dtype", "_forget", "_keeper", "_key", "_numel", "_offset", "_shelf", "_tensor")

    def __init__(self, keeper: Keeper, values: torch.Tensor) -> None:
        self._keeper, self._numel, self._dtype = keeper, values.numel(), values.dtype
        self._tensor: torch.Tensor | None = None
        self._shelf: Shelf | None = None
        self._key: int | None = None
        self._forget: weakref.finalize[..., Kept] | None = None
        self._offset = 0
        self.replace(values)

    def values(self) -> torch.Tensor:
        """(n,) the elements; from NVMe a copy, so write changes back with :meth:`replace`."""
        if self._tensor is not None:
            return self._tensor
        found = torch.empty(self._numel, dtype=self._dtype)
        if self._key is not None and self._keeper.swapper is not None:
            self._keeper.swapper.swap_in(self._key, found)
            return found
        if self._shelf is None:
            raise AssertionError("a shard that was dropped is read.")
        self._shelf.finish(self._shelf.read(0, found, self._offset))
        return found

    def replace(self, values: torch.Tensor) -> None:
        """Keep a copy of (n,) ``values``."""
        same_place = self._shelf is not None and values.nbytes <= self._numel * self._dtype.itemsize
        self._numel, self._dtype = values.numel(), values.dtype
        if self._keeper.device != "nvme" or not values.numel():
            self._tensor = self._keeper.in_memory(values)
            return
        host = values.detach().cpu().contiguous()
        if self._keeper.swapper is not None:
            if self._key is None:
                self._key = self._keeper.new_key()
                self._forget = weakref.finalize(self, self._keeper.swapper.drop, self._key)
                self._forget.atexit = False
            self._keeper.swapper.swap_out(self._key, host)
            return
        if not same_place:
            self._shelf, self._offset = self._keeper.space(values.nbytes)
        if self._shelf is None:
            raise AssertionError("no file for a shard on NVMe.")
        self._shelf.finish(self._shelf.write(0, host, self._offset))

    def copy(self) -> Kept:
        """The same elements once more, at a place of their own."""
        return Kept(self._keeper, self.values())

    def drop(self) -> None:
        """These elements are needed no longer."""
        if self._forget is not None:
            self._forget()
        self._tensor = self._shelf = self._key = None


class Keeper:
    """Keeps the shards of one Init.

    Args:
        device: "device" where the parameter is, "cpu" in host memory, "nvme" in unnamed files under ``folder``. Files
            grow by a step at a time, as it is not known beforehand how large the model will be.
        swapper: with "nvme": keeps them instead of these files.
    """

    def __init__(
        self, device: str, folder: Path | None, *, pinned: bool, aio: AioConfig | Handle | None = None,
        swapper: ParamSwapper | None = None,
    ) -> None:  # fmt: skip
        self.device, self._folder, self._pinned, self._aio = device, folder, pinned, aio
        self.swapper, self._keys = swapper, itertools.count()
        self._scratch: Scratch | None = None
        self._shelf: Shelf | None = None
        self._used = self._total = 0
        if device == "nvme" and swapper is None:
            self.scratch  # noqa: B018 - a folder that cannot be used is told before the model is built
            self.space(1)

    @property
    def scratch(self) -> Scratch:
        """The engine and its buffers."""
        if self._scratch is None:
            aio = self._aio
            self._scratch = Scratch(
                aio=aio if isinstance(aio, AioConfig) else None,
                handle=aio if isinstance(aio, Handle) else None,
                pinned=self._pinned,
            )
        return self._scratch

    def in_memory(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of ``values`` where shards live that are in memory."""
        if self.device == "device" or values.device.type == "cpu":
            return values.clone()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pinned)
        return host.copy_(values)

    def space(self, num_bytes: int) -> tuple[Shelf, int]:
        """A file and the offset of room for so many bytes in it."""
        need = round_up(num_bytes)
        if self._shelf is None or self._used + need > self._shelf.num_bytes:
            step = min(max(self._total, _SMALLEST_FILE), _LARGEST_STEP)
            self._shelf = self.scratch.shelf(self._folder, "parameters being made", [max(need, step)])
            self._total += self._shelf.num_bytes
            self._used = 0
        offset = self._used
        self._used += need
        return self._shelf, offset

    def new_key(self) -> int:
        """A number for the swapper that no other part has."""
        return next(self._keys)

    def close(self) -> None:
        """Give files and threads back; nothing is kept any more."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = self._shelf = None
