"""How the bytes of a bucket travel between the ranks that split it.

A route is a way to gather parameters or to reduce gradients; it says of itself which collectives it will issue
(:class:`~zoo.cost.collectives.Hop`), which is what a forecast is made of. Legend: see ``placement/axes.py``; P elements
of a bucket, chunk r of its flat buffer belongs to rank r of the shard group, unless ``Axes.places`` says otherwise.

=================  ===================================================================  ==============================
route              collectives                                                          a rank sends, in elements
=================  ===================================================================  ==============================
FlatGather         all-gather over p                                                    P (p-1)/p
TwoStageGather     all-gather over M of P/L, then M all-gathers over L of P/M           P/L (M-1)/M + P (L-1)/L
PlacedGather       any gather, then a copy to where chunks belong                       as that one
CastGather         any gather, of elements that are cast                                that one's, of those bytes
FlatReduce         reduce-scatter over p                                                P (p-1)/p
ReplicaReduce      any reduction, then all-reduce of P/p over N/p replicas              + 2 P/p (N/p-1)/(N/p)
WholeReduce        any reduction, then all-gather over p                                + P (p-1)/p
=================  ===================================================================  ==============================

Routes of two stages issue the second at the next gather or reduction (:func:`zoo.comm.advance`), so that it overlaps
with the unit in between, or else when a caller waits for the result: points that all ranks pass in the same order. A
gather of two stages moves more bytes in sum than a flat one, but over the slow network only what another node does
not have: P/L (M-1)/M a rank instead of P (M-1)/M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from zoo.comm import Communicator, Handle, Then, all_of
from zoo.cost.collectives import Hop
from zoo.shard.placement.axes import Axes

if TYPE_CHECKING:
    from zoo.comm.compression import Codec


class Gather(Protocol):
    """Brings chunks to all ranks of the shard group. The bucket calls it, on all of its ranks in the same order."""

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """``full`` (P,) = the shards (n,) of all ranks; ``shard`` may be this rank's chunk of ``full``."""

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """The collectives for P = ``numel`` elements."""


class Reduce(Protocol):
    """Adds gradients. The bucket calls it, on all ranks in the same order."""

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """``out`` (n,) = this rank's chunk of 1/N Σ_r full_r; ``out`` may be that chunk of ``full`` (P,)."""

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """The collectives for P = ``numel`` elements."""


class Feedback(Protocol):
    """A collective of one bucket that keeps what it left out: who steps, saves and loads sees this of it.

    Attributes:
        error_range: [start, stop) of the elements of the bucket that have an error here.
        error: fp32, what this rank has not said of them; None for zero.
        owed_range: [start, stop) of those of which this rank makes the mean.
        owed: fp32, what is added to the next mean of them, on the rank that makes it; None for nothing.
        peers: the ranks that have errors for the same elements.
        pays: of ranks that make the same mean this one has what is owed.
        apart: the ranks whose gradients are not added up where an optimizer makes the mean; None: all are.
        unit: errors times this are in the unit of whatever else may go on from them.
        has_loss_scale: errors are in units of the loss scale.
    """

    error_range: tuple[int, int]
    error: torch.Tensor | None
    owed_range: tuple[int, int]
    owed: torch.Tensor | None
    peers: Communicator
    pays: bool
    apart: Communicator | None
    unit: float
    has_loss_scale: ClassVar[bool]

    def divisor(self, num_losses: int, num_ranks: int) -> int:
        """What a sum over errors of so many ranks is divided by, where the mean is of so many losses."""

    def commit(self) -> None:
        """The step has used the latest results."""

    def roll_back(self) -> None:
        """The latest results are not used."""

    def forget(self) -> None:
        """Nothing is owed."""

    def memory_bytes(self) -> int:
        """Bytes of errors on this rank now."""


class FlatGather:
    """One all-gather."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """See :class:`Gather`."""
        return self._comm.all_gather(full, shard, label=label)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Gather`."""
        return [Hop("all_gather", self._comm, numel * itemsize)]


class TwoStageGather:
    """First between nodes, then within them: MiCS, section 3.3.

    Rank (node, local) gathers chunks (·, local) from the other nodes, P/L elements, and then, for each node, the chunks
    of that node from its neighbours, each straight to its place (the paper's "batched" all-gathers): nothing is
    rearranged, and the result has the bits of a flat gather.
    """

    def __init__(self, local: Communicator, across: Communicator) -> None:
        self._local, self._across = local, across

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """See :class:`Gather`."""
        num_nodes, numel = self._across.size, full.numel()
        mine = full.new_empty(numel // self._local.size)
        first = self._across.all_gather(mine, shard, label=f"{label}, between nodes")

        def within() -> Handle:
            pairs = zip(full.chunk(num_nodes), mine.chunk(num_nodes), strict=True)
            return all_of([self._local.all_gather(f, s, label=f"{label}, within a node") for f, s in pairs])

        return Then([first], within, staged=True)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Gather`."""
        num_nodes, num_bytes = self._across.size, numel * itemsize
        within = [Hop("all_gather", self._local, num_bytes // num_nodes)] * num_nodes
        return [Hop("all_gather", self._across, num_bytes // self._local.size), *within]


class PlacedGather:
    """Any gather, of chunks that are not in the order of the ranks: rank r has chunk ``places[r]``."""

    def __init__(self, inner: Gather, places: Sequence[int]) -> None:
        self._inner, self._places = inner, places

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """See :class:`Gather`."""
        by_rank = torch.empty_like(full)

        def rearrange() -> None:
            shape = len(self._places), full.numel() // len(self._places)
            chunks = full.view(shape)
            for place, chunk in zip(self._places, by_rank.view(shape), strict=True):
                chunks[place].copy_(chunk)

        return Then([self._inner.start(by_rank, shard, label)], rearrange)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Gather`."""
        return self._inner.hops(numel, itemsize)


class CastGather:
    """Any gather, in another dtype: every rank casts its shard and all, the owner too, compute with what arrived.

    Where each use of a parameter is a cast to this dtype, as under autocast, results are those of a gather without.
    """

    def __init__(self, inner: Gather, dtype: torch.dtype) -> None:
        self._inner, self._dtype = inner, dtype

    def start(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> Handle:
        """See :class:`Gather`."""
        arrived = torch.empty_like(full, dtype=self._dtype)

        def widen() -> None:
            full.copy_(arrived)

        return Then([self._inner.start(arrived, shard.to(self._dtype), label)], widen)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Gather`."""
        return self._inner.hops(numel, self._dtype.itemsize)


class FlatReduce:
    """One reduce-scatter, scaled to the mean over all N ranks: by 1/``before`` ahead of the sum, by the rest after it.

    Dividing first keeps sums of 16-bit gradients from overflowing, and loses more of small ones.
    """

    def __init__(self, comm: Communicator, num_ranks: int, before: float = 1.0) -> None:
        self._comm, self._before, self._scale = comm, min(before, num_ranks), min(before, num_ranks) / num_ranks

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`Reduce`."""
        if self._before != 1.0:
            full.mul_(1.0 / self._before)
        return self._comm.reduce_scatter(full, out, scale=self._scale, label=label)

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """Memory for a ``full`` that is then reduced without a copy, once; None where there is none."""
        return self._comm.room(num_bytes)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Reduce`."""
        return [Hop("reduce_scatter", self._comm, numel * itemsize)]


class ReplicaReduce:
    """What the shard group summed, summed over its replicas: MiCS, section 3.4, for every backward."""

    def __init__(self, inner: Reduce, axes: Axes) -> None:
        self._inner, self._size, self._replicas = inner, axes.shard.size, axes.replicas

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`Reduce`."""
        inner = self._inner.start(full, out, label)
        return Then([inner], lambda: self._replicas.all_reduce(out), staged=True)

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """See :class:`FlatReduce`."""
        return self._inner.room(num_bytes) if isinstance(self._inner, FlatReduce) else None

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Reduce`."""
        mine = Hop("all_reduce", self._replicas, numel // self._size * itemsize)
        return [*self._inner.hops(numel, itemsize), mine]


class WholeReduce:
    """The mean of all P elements on every rank, with the bits of a reduction to owners and a gather."""

    def __init__(self, inner: Reduce, comm: Communicator) -> None:
        self._inner, self._comm = inner, comm

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`Reduce`; ``out`` is ``full``."""
        n = full.numel() // self._comm.size
        chunk = full[self._comm.rank * n : (self._comm.rank + 1) * n]
        return Then([self._inner.start(full, chunk, label)], lambda: self._comm.all_gather(full, chunk, label=label))

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`Reduce`."""
        return [*self._inner.hops(numel, itemsize), Hop("all_gather", self._comm, numel * itemsize)]


@dataclass
class Switch:
    """Whether the gradients of the next step stay each rank's own. It says the same on all ranks.

    Attributes:
        own: they do.
        left: of the gradients that there are some have stayed so.
        codec: what compresses.
        unit: an error of a gradient that much smaller is one of what the optimizer compresses: 1 - β1 of a momentum.
    """

    codec: Codec
    unit: float = 1.0
    own: bool = False
    left: bool = False

    def decide(self, *, own: bool, afresh: bool) -> None:
        """What the next reductions do; ``afresh``: there are no gradients yet."""
        self.own, self.left = own, self.left and not afresh


@dataclass(frozen=True, kw_only=True)
class Routes:
    """How one bucket travels.

    Attributes:
        gather: parameters of a partitioned bucket, before forward and backward.
        exact: the same, when they are wanted as they are kept; the same object unless ``gather`` rounds.
        reduce: gradients.
        pack: keeps a chunk in another form than its dtype; None for plain chunks.
        secondary: hpZ (ZeRO++, section 3.2): parameters before backward, from the parts that the ranks of a node kept
            of what forward gathered. The same bits, and nothing leaves the node.
        feedback: the errors of ``reduce``, or of the optimizer's mean, where there are any; each bucket has its own.
        reduces_whole: ``reduce`` is given ``full`` as ``out``, and gives every rank the mean of all P elements.
        switch: whether ``reduce`` leaves to the optimizer what the states repeat; None: it never does.
    """

    axes: Axes
    gather: Gather
    exact: Gather
    reduce: Reduce
    secondary: Gather | None = None
    pack: Packer | None = None
    feedback: Feedback | None = None
    reduces_whole: bool = False
    switch: Switch | None = None

    def apart(self) -> Communicator | None:
        """The ranks between which the next step's gradients of this bucket are not added up; None: all are."""
        if self.switch is None or not self.switch.own or self.feedback is None:
            return None
        return self.feedback.apart

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """Memory for gradients that are reduced without a copy, and dropped then; None where there is none."""
        reduce = self.reduce
        return reduce.room(num_bytes) if isinstance(reduce, (FlatReduce, ReplicaReduce)) else None

    def shard_bytes(self, numel: int, itemsize: int) -> int:
        """What a chunk of n = ``numel`` elements takes where it is kept."""
        return self.pack.nbytes(numel) if self.pack is not None else numel * itemsize


class Packed(Protocol):
    """A chunk that is kept in another form."""

    @property
    def raw(self) -> torch.Tensor:
        """(nbytes,) uint8: all of it."""

    @property
    def nbytes(self) -> int:
        """What it takes."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Packed:
        """The same on another device."""

    def start(self, full: torch.Tensor, label: str) -> Handle:
        """Gather ``full`` (P,) from the packed chunks of all ranks, which do the same."""

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """(n,) what it stands for."""


class Packer(Protocol):
    """Packs chunks."""

    def __call__(self, values: torch.Tensor) -> Packed:
        """Pack (n,) ``values``."""

    def over(self, raw: torch.Tensor) -> Packed:
        """What the bytes of a packed chunk stand for; no copy. They begin at a multiple of 4."""

    def parts(self, numel: int, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        """Which bytes of n packed elements to read for the elements [start, stop).

        Returns:
            The element that they begin with, at most ``start``; and their ranges [begin, end). Put together in this
            order they can be given to :meth:`over`.
        """

    def nbytes(self, numel: int) -> int:
        """What n = ``numel`` elements take."""

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """The collectives that gather P = ``numel`` elements."""


def plain_routes(axes: Axes, *, two_stages: bool = False, predivide: float = 1.0) -> Routes:
    """Routes that round nothing."""
    exact: Gather = FlatGather(axes.shard)
    if two_stages and axes.local.size > 1 and axes.across.size > 1:
        exact = TwoStageGather(axes.local, axes.across)
    if axes.places is not None:
        exact = PlacedGather(exact, axes.places)
    secondary = FlatGather(axes.secondary) if axes.secondary is not None else None
    reduce = with_replicas(FlatReduce(axes.shard, axes.num_losses, predivide), axes)
    return Routes(axes=axes, gather=exact, exact=exact, reduce=reduce, secondary=secondary)


def cast_routes(routes: Routes, dtype: torch.dtype) -> Routes:
    """Parameters that are needed for forward and backward travel in ``dtype``."""
    secondary = CastGather(routes.secondary, dtype) if routes.secondary is not None else None
    return replace(routes, gather=CastGather(routes.exact, dtype), secondary=secondary)


def with_replicas(reduce: Reduce, axes: Axes) -> Reduce:
    """A reduction within the shard group, continued to its replicas where there are any."""
    return ReplicaReduce(reduce, axes) if axes.replicas.size > 1 else reduce
