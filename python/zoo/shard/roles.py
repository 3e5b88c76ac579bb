"""The elements of one role of one bucket on this rank, under one placement.

A bucket has the roles "parameter" (between the uses of its parameters), "original" (the values that they came with,
where the model computes in a dtype that rounds them) and "gradient" (reduced). A :class:`RoleBuffer` is the only one
that knows in which tier and form the elements of a role are kept: it reads, lends, writes and moves them.

Of a trainable bucket originals are what the masters start from: the optimizer takes them over, as the very memory of
its masters where it can. Of a frozen bucket they are the values, and stay.

Legend: n elements of this rank, those from ``first`` on of the bucket's flat buffer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from zoo.layout import Stored
from zoo.shard.offload.tiers import Tier

if TYPE_CHECKING:
    from zoo.layout import Lent
    from zoo.shard.collectives.routes import Packed, Packer
    from zoo.shard.offload.scratch import NvmeFile, Scratch

PARAMETER, ORIGINAL, GRADIENT = "parameter", "original", "gradient"


class Store(Protocol):
    """Keeps elements outside of memory, each role in its own region: a file (``NvmeFile``), or what a user gives.

    A :class:`RoleBuffer` calls it on the rank that has these elements; ``finish`` gets what ``read`` and ``write``
    return.
    """

    def read(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """Begin filling ``tensor`` from byte ``offset`` of a region."""

    def write(self, region: int, tensor: torch.Tensor, offset: int = 0, *, urgent: bool = False) -> Any:
        """Begin writing ``tensor`` at byte ``offset`` of a region."""

    def finish(self, future: Any) -> None:
        """Wait for an operation."""

    def drop(self, region: int) -> None:
        """What a region holds is needed no longer."""


class States(Protocol):
    """The roles of buckets that a user of them keeps: an optimizer its masters, moments and errors.

    ``read`` and ``edit`` go over the roles by name, where "parameter" are the exact values.
    """

    @property
    def are_whole(self) -> bool:
        """They exist, and are all of one step."""

    @property
    def that_follow(self) -> Collection[str]:
        """The roles that take new values of the parameters too."""

    def read(self, bucket: Any) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Where a piece of a bucket begins in its flat buffer, and by role its elements. Go to the end."""

    def edit(
        self, buckets: Collection[Any], change: Callable[[Any, dict[str, torch.Tensor]], None], *, precise: bool = False
    ) -> None:
        """Let ``change`` write to the roles of each piece, which has ``bucket`` and ``slices()``."""

    def check_writable(self) -> None:
        """Raise RuntimeError where each rank has parameters of its own now."""

    def refuse_writes(self, why: str) -> None:
        """The same; nothing goes on then until a state is loaded."""


class RoleBuffer:
    """See the file's docstring.

    Args:
        numel, dtype, device: n, and what the elements are on the device that computes with them.
        first: where they begin in the bucket's flat buffer.
        tier: where they live.
        pack: keeps them as int8 with scales; None to keep them as they are.
        scratch: buffers of host memory, for the other tiers; None: they come from torch.
        store, region, offset: where they are on NVMe, from byte ``offset`` of a region on.

    Attributes:
        values: (n,) the elements; None while they are on NVMe or packed.
        packed: int8 and scales; None while they are on NVMe or plain.
        pack, first, tier, offset: as given.
        leaves_device: they live in other memory than that in which they are made.
        kept: there are elements, wherever.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, first: int = 0, tier: Tier = Tier.DEVICE,
        pack: Packer | None = None, scratch: Scratch | None = None, store: Store | None = None, region: int = 0,
        offset: int = 0,
    ) -> None:  # fmt: skip
        self.numel, self.dtype, self.device, self.pack = numel, dtype, device, pack
        self.first, self.tier = first, tier
        self.leaves_device = tier is Tier.NVME or (tier is Tier.HOST and device.type != "cpu")
        self._scratch, self._store, self._region, self.offset = scratch, store, region, offset
        self.values: torch.Tensor | None = None
        self.packed: Packed | None = None
        self.kept = self._is_view = False
        self._arrived: torch.cuda.Event | None = None  # of a copy to the host

    @classmethod
    def within(cls, values: torch.Tensor, first: int) -> RoleBuffer:
        """Elements of a buffer that is whole on this rank: ``values`` is a view of it, and stays so."""
        made = cls(values.numel(), values.dtype, values.device, first=first)
        made.values, made.kept, made._is_view = values, True, True
        return made

    @property
    def nbytes(self) -> int:
        """What they take in this rank's memory now."""
        return sum(t.nbytes for t in (self.values, self.packed) if t is not None)

    @property
    def stored_nbytes(self) -> int:
        """What they take in the form in which they are kept, wherever."""
        return self.pack.nbytes(self.numel) if self.pack is not None else self.numel * self.dtype.itemsize

    @property
    def is_away(self) -> bool:
        """They are kept, and not in memory."""
        return self.kept and self.values is None and self.packed is None

    # Reading ---------------------------------------------------------------------------------------------------------

    def read(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Elements [start, start + length) of them, all by default: the live ones, or a copy where they are on NVMe or
        packed."""
        if (values := self.values) is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
                self._arrived = None
            return values if length is None else values[start : start + length]
        stop = self.numel if length is None else start + length
        if self.packed is not None:
            return self.packed.values(self.dtype)[start:stop]
        if self.device.type == "meta":
            return torch.empty(stop - start, dtype=self.dtype, device=self.device)
        if self.pack is not None and length is None:
            return self.pack.over(self.stored()).values(self.dtype)
        if self.pack is not None:
            return self._read_packed(self.pack, start, stop)
        copy = self.buffer(stop - start, self.dtype)
        self.finish(self.begin_read(copy, start, urgent=True))
        return copy

    def _read_packed(self, pack: Packer, start: int, stop: int) -> torch.Tensor:
        first, ranges = pack.parts(self.numel, start, stop)
        raw = self.buffer(sum(end - begin for begin, end in ranges), torch.uint8)
        pieces = raw.split_with_sizes([end - begin for begin, end in ranges])
        reads = [self.begin_read(p, begin, urgent=True) for p, (begin, _) in zip(pieces, ranges, strict=True)]
        for read in reads:
            self.finish(read)
        return pack.over(raw).values(self.dtype)[start - first :][: stop - start]

    def stored(self) -> torch.Tensor:
        """Bytes: int8 and scales, where that is what is kept; from NVMe a copy."""
        if self.values is not None:
            return self.values
        if self.packed is not None:
            return self.packed.raw
        if self.device.type == "meta":
            return torch.empty(self.stored_nbytes, dtype=torch.uint8, device=self.device)
        copy = self.buffer(self.stored_nbytes, torch.uint8)
        self.finish(self.begin_read(copy, urgent=True))
        return copy

    def source(self, start: int = 0, length: int | None = None) -> torch.Tensor | Stored:
        """The same as :meth:`read` for a :class:`~zoo.layout.StateSlice`: what is not in memory is not read yet."""
        stop = self.numel if length is None else start + length
        if self.values is not None:
            return self.values[start:stop]
        return Stored(self.read, self.dtype, start, stop - start, lend=self.lender(), in_memory=self.packed is not None)

    def lender(self, start: int = 0) -> Callable[[int], Lent] | None:
        """What lends the bytes from element ``start`` on; None where they are not on NVMe as they are."""
        if self.values is not None or self.packed is not None or self.pack is not None:
            return None
        if self._store is None or not hasattr(self._store, "lend"):
            return None
        return cast("NvmeFile", self._store).lender(self._region, self.offset + start * self.dtype.itemsize)

    def lend(self, start: int = 0, stop: int | None = None, *, read: bool = True) -> Loan:
        """Elements [start, stop) of what is on NVMe, which begin to come in; ``read=False``: room for others."""
        return Loan(self, start, (self.numel if stop is None else stop) - start, read=read)

    # Writing ---------------------------------------------------------------------------------------------------------

    def set(self, values: torch.Tensor) -> None:
        """Keep a copy of (n,) ``values``."""
        if self._is_view and self.values is not None:
            self.values.copy_(values)
        else:
            self._keep(values, own=False)

    def put(self, values: torch.Tensor) -> None:
        """Keep (n,) ``values`` themselves, which nobody else writes to any more; a copy to the host may be under way
        afterwards."""
        if self.leaves_device or self.pack is not None:
            self._keep(values, own=True)
        else:
            self.values, self.kept = values, True

    @contextlib.contextmanager
    def borrow(self) -> Iterator[torch.Tensor]:
        """(n,) the elements in memory, to be written to; what was written counts from the end on."""
        values = self.read()
        yield values
        if self.values is None:  # it was a copy
            self.put(values)

    def take(self, other: RoleBuffer) -> None:
        """Keep what ``other`` keeps of a value of the same layout, converted to this one's dtype and device."""
        if other.pack is not None and self.dtype.is_floating_point and self.dtype.itemsize < 8:
            self.pack, self.kept = other.pack, True  # int8 and scales stand for the same values
            kept = other.stored()
            raw = self._placed(kept, own=False)
            raw = raw.clone() if raw is kept else raw
            self.packed, self.values = self.pack.over(raw) if raw is not None else None, None
        else:
            self.pack = None
            self.set(other.read().to(self.device, self.dtype))

    def drop(self) -> None:
        """The elements are needed no longer."""
        self.values = self.packed = None
        if self.kept and self.tier is Tier.NVME:
            self._there().drop(self._region)
        self.kept = False

    def _keep(self, values: torch.Tensor, *, own: bool) -> None:
        self.kept = False  # where placing them fails there are none: what was kept is partly overwritten
        if values.is_meta:
            self.values = None if self.tier is Tier.NVME else values
        elif self.pack is not None:
            raw = self._placed(self.pack(values).raw, own=False)
            self.packed, self.values = self.pack.over(raw) if raw is not None else None, None
        else:
            kept = self._placed(values, own=own)
            self.packed, self.values = None, values.clone() if kept is values and not own else kept
        self.kept = True

    def _placed(self, kept: torch.Tensor, *, own: bool) -> torch.Tensor | None:
        """What is kept, where it lives: None on NVMe, the same tensor if it is there already."""
        if not self.leaves_device:
            return kept
        if self.tier is Tier.NVME and self.reaches(kept.device):
            self.finish(self.begin_write(kept))
            return None
        host, scratch = kept, self._scratch
        if kept.device.type != "cpu" or (scratch is not None and not (own and scratch.pool.owns(kept))):
            host = self.buffer(kept.numel(), kept.dtype).copy_(kept, non_blocking=own and self.tier is Tier.HOST)
        if self.tier is Tier.NVME:
            self.finish(self.begin_write(host))
            return None
        if own and kept.device.type == "cuda":
            self._arrived = self._event()
            if scratch is not None and scratch.pool.owns(host):  # it may be dropped before it has arrived
                scratch.pool.record_event(host, self._arrived)
        return host

    # Memory ----------------------------------------------------------------------------------------------------------

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory from which NVMe and devices are reached."""
        if self._scratch is None:
            return torch.empty(numel, dtype=dtype)
        return self._scratch.pool.empty(numel, dtype=dtype)

    def copying(self) -> None:
        """A copy of what is kept in host memory was begun on the device's current stream: until then it stays."""
        kept = self.packed.raw if self.packed is not None else self.values
        if kept is None or self._scratch is None or self.device.type == "cpu" or not self._scratch.pool.owns(kept):
            return
        self._scratch.pool.record_event(kept, self._event())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    # NVMe ------------------------------------------------------------------------------------------------------------

    def reaches(self, device: torch.device) -> bool:
        """Whether what is on NVMe travels between it and a device without host memory in between."""
        return device.type == "cuda" and bool(getattr(self._store, "gds", False))

    def part_of(self, region: torch.Tensor) -> torch.Tensor:
        """(n,) the elements in a copy of their region, as bytes."""
        return region[self.offset : self.offset + self.stored_nbytes].view(self.dtype)

    def begin_read(self, into: torch.Tensor, start: int = 0, *, urgent: bool = False) -> Any:
        """Begin reading from NVMe, from element ``start`` (of what is packed: byte) on.

        ``urgent``: to compute with it.
        """
        return self._there().read(self._region, into, self.offset + start * into.itemsize, urgent=urgent)

    def begin_write(self, values: torch.Tensor, start: int = 0, *, urgent: bool = True) -> Any:
        """Begin writing to NVMe, from element ``start`` (of what is packed: byte) on.

        ``urgent``: the next forward may wait for it.
        """
        return self._there().write(self._region, values, self.offset + start * values.itemsize, urgent=urgent)

    def finish(self, future: Any) -> None:
        """Wait for what :meth:`begin_read` or :meth:`begin_write` began."""
        self._there().finish(future)

    def forget(self) -> None:
        """What was written to NVMe by :meth:`begin_write`, or failed to be, is of no use any more."""
        cast("NvmeFile", self._there()).forget()

    def _there(self) -> Store:
        if self._store is None:
            raise AssertionError("elements that are in memory are looked for on NVMe.")
        return self._store


class Loan:
    """Elements of a role in memory for a while: read ahead, used, and stored again or not.

    Attributes:
        values: (n,) they; valid from :meth:`finish` on, and until what :meth:`store` began is finished.
    """

    def __init__(self, role: RoleBuffer, start: int, numel: int, *, read: bool) -> None:
        self._role, self._start = role, start
        self.values = role.buffer(numel, role.dtype)
        self._future: Any = role.begin_read(self.values, start) if read else None

    def done(self) -> bool:
        """Whether :meth:`finish` would not have to wait."""
        return self._future is None or bool(self._future.done())

    def finish(self) -> None:
        """Wait for what was begun."""
        future, self._future = self._future, None
        if future is not None:
            self._role.finish(future)

    def store(self, *, urgent: bool = True) -> None:
        """Begin to bring the values back."""
        self._future = self._role.begin_write(self.values, self._start, urgent=urgent)


# Powers of a role's elements, of which norms are made.


def power_of(chunk: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Σ |g|^p, or the largest |g| for p = infinity; computed in fp64, where the squares of shorter types are exact."""
    if math.isinf(p):
        largest: torch.Tensor = torch.linalg.vector_norm(chunk, p)
        return largest.double()
    if p == 2.0:
        return sums_of_squares([chunk])[0]
    sizes = chunk.abs()
    return sizes.sum(dtype=torch.float64) if p == 1.0 else sizes.double().pow_(p).sum()


def sums_of_squares(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """By the kernel, whose bits depend on neither threads nor instruction set, where zoo-kernels is installed."""
    try:
        from zoo.kernels.norm.ops import sum_squares
    except ImportError:
        return torch.stack([chunk.double().square().sum() for chunk in chunks])
    found: torch.Tensor = sum_squares(chunks)
    return found
