"""Where the shards of a model live before an optimizer takes them: device, host memory or NVMe."""

from __future__ import annotations

from pathlib import Path

import torch

from zoo.io import AioConfig, Handle
from zoo.zero.offload.scratch import Scratch, Shelf, round_up

_SMALLEST_FILE = 2**26
_LARGEST_STEP = 2**30


class Kept:
    """This rank's elements of one parameter: (n,) in memory, or a region of a file."""

    __slots__ = ("_dtype", "_keeper", "_numel", "_offset", "_shelf", "_tensor")

    def __init__(self, keeper: Keeper, values: torch.Tensor) -> None:
        self._keeper, self._numel, self._dtype = keeper, values.numel(), values.dtype
        self._tensor: torch.Tensor | None = None
        self._shelf: Shelf | None = None
        self._offset = 0
        self.replace(values)

    def values(self) -> torch.Tensor:
        """(n,) the elements; from NVMe a copy, so write changes back with :meth:`replace`."""
        if self._tensor is not None:
            return self._tensor
        if self._shelf is None:
            raise AssertionError("a shard that was dropped is read.")
        found = torch.empty(self._numel, dtype=self._dtype)
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
        self._tensor = self._shelf = None

    def on_nvme(self) -> bool:
        """They are in a file."""
        return self._shelf is not None


class Keeper:
    """Keeps the shards of one Init.

    Args:
        device: "device" where the parameter is, "cpu" in host memory, "nvme" in unnamed files under ``folder``. Files
            grow by a step at a time, as it is not known beforehand how large the model will be.
    """

    def __init__(
        self, device: str, folder: Path | None, *, pinned: bool, aio: AioConfig | Handle | None = None
    ) -> None:
        self.device, self._folder, self._pinned, self._aio = device, folder, pinned, aio
        self._scratch: Scratch | None = None
        self._shelf: Shelf | None = None
        self._used = self._total = 0
        if device == "nvme":
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

    def close(self) -> None:
        """Give files and threads back; nothing is kept any more."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = self._shelf = None
