"""This rank's elements of a flat value: the form in which they are kept, and the tier where they live.

Legend: n elements of a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from zoo.zero.offload.tiers import Tier

if TYPE_CHECKING:
    from zoo.layout import Lent
    from zoo.zero.collectives.routes import Packed, Packer
    from zoo.zero.offload.scratch import Scratch, Shelf


class Store(Protocol):
    """Keeps shards outside of memory, each in a region of its own: a file (``Shelf``), or what the user gives.

    A :class:`Shard` calls it on the rank that has these elements; ``finish`` gets what ``read`` and ``write`` return.
    """

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """Begin filling ``tensor`` from byte ``offset`` of a region."""

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """Begin writing ``tensor`` at byte ``offset`` of a region."""

    def finish(self, future: Any) -> None:
        """Wait for an operation."""


class Shard:
    """See the file's docstring.

    Args:
        numel, dtype, device: n, and what the elements are on the device that computes with them.
        tier: where they live.
        pack: keeps them as int8 with scales; None to keep them as they are.
        scratch: buffers of host memory, for the other tiers; None: they come from torch.
        store, region: where they are on NVMe.
        forget: called when they are needed no longer.

    Attributes:
        values: (n,) the elements; None while they are on NVMe or packed.
        packed: int8 and scales; None while they are on NVMe or plain.
        pack: as given.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, tier: Tier = Tier.DEVICE,
        pack: Packer | None = None, scratch: Scratch | None = None, store: Store | None = None, region: int = 0,
        forget: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        self.numel, self.dtype, self.device, self.pack = numel, dtype, device, pack
        self._tier, self._scratch, self._store, self._region = tier, scratch, store, region
        self.values: torch.Tensor | None = None
        self.packed: Packed | None = None
        self._forget, self._is_view = forget, False

    @classmethod
    def within(cls, values: torch.Tensor) -> Shard:
        """Elements of a buffer that is whole on this rank: ``values`` is a view of it, and stays so."""
        made = cls(values.numel(), values.dtype, values.device)
        made.values, made._is_view = values, True
        return made

    @property
    def nbytes(self) -> int:
        """What they take in this rank's memory now."""
        return sum(t.nbytes for t in (self.values, self.packed) if t is not None)

    @property
    def stored_nbytes(self) -> int:
        """What they take in the form in which they are kept, wherever."""
        return self.pack.nbytes(self.numel) if self.pack is not None else self.numel * self.dtype.itemsize

    def whole(self) -> torch.Tensor:
        """(n,) the elements: the live ones, or a copy where they are on NVMe or packed."""
        if self.values is not None:
            return self.values
        kept = self.stored()
        return kept if self.pack is None else self.pack.over(kept).values(self.dtype)

    def stored(self) -> torch.Tensor:
        """What is kept, in the form in which it is kept; from NVMe a copy."""
        if self.values is not None:
            return self.values
        if self.packed is not None:
            return self.packed.raw
        dtype = self.dtype if self.pack is None else torch.uint8
        if self.device.type == "meta":
            return torch.empty(self.stored_nbytes // dtype.itemsize, dtype=dtype, device=self.device)
        copy = self.buffer(self.stored_nbytes // dtype.itemsize, dtype)
        self.finish(self.begin_read(copy, urgent=True))
        return copy

    def set(self, values: torch.Tensor) -> None:
        """Keep (n,) ``values``."""
        if self._is_view and self.values is not None:
            self.values.copy_(values)
        elif values.is_meta:
            self.values = None if self._tier is Tier.NVME else values
        elif self.pack is not None:
            raw = self._placed(self.pack(values).raw)
            self.packed, self.values = self.pack.over(raw) if raw is not None else None, None
        else:
            kept = self._placed(values)
            self.packed, self.values = None, values.clone() if kept is values else kept

    def take(self, other: Shard) -> None:
        """Keep what ``other`` keeps of a value of the same layout, converted to this one's dtype and device."""
        if other.pack is not None and self.dtype.is_floating_point and self.dtype.itemsize < 8:
            self.pack = other.pack  # int8 and scales stand for the same values
            kept = other.stored()
            raw = self._placed(kept)
            raw = raw.clone() if raw is kept else raw
            self.packed, self.values = self.pack.over(raw) if raw is not None else None, None
        else:
            self.pack = None
            self.set(other.whole().to(self.device, self.dtype))

    def drop(self) -> None:
        """The elements are needed no longer."""
        self.values = self.packed = None
        forget, self._forget = self._forget, None
        if forget is not None:
            forget()

    @contextlib.contextmanager
    def edited(self) -> Iterator[torch.Tensor]:
        """(n,) the elements, to be written to; what was written counts from the end on."""
        values = self.whole()
        yield values
        if self.values is None:  # it was a copy
            self.set(values)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory from which NVMe and devices are reached."""
        if self._scratch is None:
            return torch.empty(numel, dtype=dtype)
        return self._scratch.pool.empty(numel, dtype=dtype)

    def lent(self) -> None:
        """A copy of what is kept in host memory was begun on the device's current stream: until then it stays."""
        kept = self.packed.raw if self.packed is not None else self.values
        if kept is None or self._scratch is None or self.device.type == "cpu" or not self._scratch.pool.owns(kept):
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        self._scratch.pool.record_event(kept, event)

    def _placed(self, kept: torch.Tensor) -> torch.Tensor | None:
        """What is kept, where it lives: None on NVMe, the same tensor if it is there already."""
        if self._tier is Tier.DEVICE or (self._tier is Tier.HOST and self.device.type == "cpu"):
            return kept
        if self._tier is Tier.NVME and self.reaches(kept.device):
            self.finish(self.begin_write(kept))
            return None
        copies = self._scratch is not None or kept.device.type != "cpu"
        host = self.buffer(kept.numel(), kept.dtype).copy_(kept) if copies else kept
        if self._tier is Tier.HOST:
            return host
        self.finish(self.begin_write(host))
        return None

    # NVMe ------------------------------------------------------------------------------------------------------------

    def load(self, start: int, length: int) -> torch.Tensor:
        """(length,) elements [start, start + length), from NVMe or of what is packed."""
        if self.packed is not None:
            return self.packed.values(self.dtype)[start : start + length]
        if self.pack is not None:
            return self._load_packed(self.pack, start, length)
        copy = self.buffer(length, self.dtype)
        self.finish(self.begin_read(copy, start, urgent=True))
        return copy

    def _load_packed(self, pack: Packer, start: int, length: int) -> torch.Tensor:
        first, ranges = pack.parts(self.numel, start, start + length)
        raw = self.buffer(sum(end - begin for begin, end in ranges), torch.uint8)
        pieces = raw.split_with_sizes([end - begin for begin, end in ranges])
        reads = [self.begin_read(p, begin, urgent=True) for p, (begin, _) in zip(pieces, ranges, strict=True)]
        for read in reads:
            self.finish(read)
        return pack.over(raw).values(self.dtype)[start - first :][:length]

    def lender(self, start: int = 0) -> Callable[[int], Lent] | None:
        """What lends the bytes from element ``start`` on; None where they are not on NVMe as they are."""
        if self.values is not None or self.packed is not None or self.pack is not None:
            return None
        if self._store is None or not hasattr(self._store, "lend"):
            return None
        return cast("Shelf", self._store).lender(self._region, start * self.dtype.itemsize)

    def reaches(self, device: torch.device) -> bool:
        """Whether what is on NVMe travels between it and a device without host memory in between."""
        return device.type == "cuda" and bool(getattr(self._store, "gds", False))

    def begin_read(self, into: torch.Tensor, start: int = 0, *, urgent: bool = False) -> Any:
        """Begin reading from NVMe, from element ``start`` (of what is packed: byte) on.

        ``urgent``: to compute with it.
        """
        return self._there().read(self._region, into, start * into.itemsize, urgent=urgent)

    def begin_write(self, values: torch.Tensor, start: int = 0) -> Any:
        """Begin writing to NVMe, from element ``start`` (of what is packed: byte) on.

        The next forward may wait for it.
        """
        return self._there().write(self._region, values, start * values.itemsize, urgent=True)

    def finish(self, future: Any) -> None:
        """Wait for what :meth:`begin_read` or :meth:`begin_write` began."""
        self._there().finish(future)

    def _there(self) -> Store:
        if self._store is None:
            raise AssertionError("a shard that is in memory is looked for on NVMe.")
        return self._store
