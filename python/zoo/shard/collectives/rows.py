"""Gradients of embeddings that travel as the rows that were touched, and not as the whole table.

Legend: p ranks of the shard group, a table of V rows of D elements of s bytes, of which rank r has touched K_r (a row
with a bit that is not 0), S_r of them in chunks of other ranks; a flat buffer has P ≥ V D elements, chunks are whole
rows. K = max_r K_r, S = max_r S_r.

First every rank tells all others how many rows it has, so that all of them choose alike:

=====================  ================================================  =============================================
the mean is wanted     rows: collectives, and what a rank sends          dense: what a rank sends
=====================  ================================================  =============================================
on every rank          all-gather of K indices and of K rows,            reduce-scatter and all-gather,
                       K (D s + 8) (p-1)                                 2 P s (p-1)/p
this rank's chunk      all-to-all: to each rank the rows of its chunk,   reduce-scatter,
                       at most S (D s + 8)                               P s (p-1)/p
=====================  ================================================  =============================================

Rows are sent where they take at most half of the bytes of the dense way, which is taken otherwise: so a step sends the
bytes of the dense way at the most, and the counts (8 p bytes to each rank, of which the log has all).

The sum is bitwise that of the dense reduction in rank order, of which the rows that a rank has not touched are +0.
That is the neutral element of all sums but one: -0 + -0 = -0. So where every rank has touched a row its sum begins with
-0, which is neutral everywhere, and with +0 elsewhere.
"""

from __future__ import annotations

import torch

from zoo.comm import Handle, Then
from zoo.cost.collectives import Hop
from zoo.shard.collectives.routes import Reduce, WholeReduce
from zoo.shard.placement.axes import Axes

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX_BYTES = 8


class RowReduce:
    """A reduction of one table; see above.

    Args:
        dense: the other way.
        axes: whose shard group has all ranks.
        shape: (V, D).
        whole: every rank gets the mean of all chunks; ``out`` of :meth:`start` is ``full`` itself then.
        predivide: gradients are divided by it before they are added up.

    Attributes:
        sent: the collectives of the latest reduction, beside that of the counts.
    """

    def __init__(
        self, dense: Reduce, axes: Axes, shape: tuple[int, int], *, whole: bool, predivide: float = 1.0
    ) -> None:
        self._comm = axes.shard
        self._dense = WholeReduce(dense, axes.shard) if whole else dense
        self._num_rows, self._width = shape
        self._whole = whole
        self._before = min(predivide, axes.num_losses)
        self._scale = self._before / axes.num_losses
        self.sent: list[Hop] = []

    # How much ----------------------------------------------------------------------------------------------------

    def counts_hop(self) -> Hop:
        """What is sent in any case: p numbers of each rank, of the rows that it has for each."""
        return Hop("all_gather", self._comm, 8 * self._comm.size**2)

    def hops(self, numel: int, itemsize: int) -> list[Hop]:
        """See :class:`~zoo.shard.collectives.routes.Reduce`: the most that it can be."""
        return [self.counts_hop(), *self._dense.hops(numel, itemsize)]

    def takes_rows(self, numbers: list[list[int]], numel: int, itemsize: int) -> bool:
        """Whether rows are sent, where ``numbers[r]`` has how many rank r has for each rank."""
        sent = max(sum(row) - row[rank] for rank, row in enumerate(numbers))
        dense = sum(hop.sent()[0] for hop in self._dense.hops(numel, itemsize))
        return 2 * sent * (self._width * itemsize + _INDEX_BYTES) <= dense

    # The reduction -----------------------------------------------------------------------------------------------

    def start(self, full: torch.Tensor, out: torch.Tensor, label: str) -> Handle:
        """See :class:`~zoo.shard.collectives.routes.Reduce`. Rows are sent as the second stage."""
        table = full[: self._num_rows * self._width].view(self._num_rows, self._width)
        bits = table.view(_BITS[full.itemsize])
        mine = (bits.amax(1) | bits.amin(1)).nonzero().view(-1)  # a sixth of the time of any(1)
        size = self._comm.size
        if self._whole:
            counts = mine.new_full((size,), mine.numel())
        else:
            counts = torch.bincount(mine // self._rows_of(full), minlength=size)
        everyone = counts.new_empty(size * size)
        first = self._comm.all_gather(everyone, counts, label=f"{label}, how many rows")

        def second() -> Handle:
            numbers: list[list[int]] = everyone.view(size, size).tolist()
            self.sent = []
            if not any(map(any, numbers)):
                return Then([], lambda: self._finish_empty(full, out))
            if not self.takes_rows(numbers, full.numel(), full.itemsize):
                self.sent = self._dense.hops(full.numel(), full.itemsize)
                return self._dense.start(full, out, label)
            rows = table.index_select(0, mine)
            if self._before != 1.0:
                rows.mul_(1.0 / self._before)
            send = self._gather_rows if self._whole else self._exchange_rows
            return send(mine, rows, numbers, full, out, label)

        return Then([first], second, staged=True)

    def _rows_of(self, full: torch.Tensor) -> int:
        """Rows of a chunk."""
        return full.numel() // (self._comm.size * self._width)

    def _gather_rows(
        self, mine: torch.Tensor, rows: torch.Tensor, numbers: list[list[int]], full: torch.Tensor, out: torch.Tensor,
        label: str,
    ) -> Handle:  # fmt: skip
        counts = [row[0] for row in numbers]
        size, most = len(counts), max(counts)
        indices, values = mine.new_zeros(size, most), rows.new_zeros(size, most, self._width)
        indices[self._comm.rank, : len(mine)], values[self._comm.rank, : len(mine)] = mine, rows
        handles = [
            self._comm.all_gather(everyone.view(-1), everyone[self._comm.rank].view(-1), label=f"{label}, {what}")
            for everyone, what in ((indices, "which rows"), (values, "rows"))
        ]
        self.sent = [Hop("all_gather", self._comm, t.nbytes) for t in (indices, values)]
        parts = [(indices[r, :n], values[r, :n]) for r, n in enumerate(counts)]
        return Then(handles, lambda: self._add(parts, full, out, 0, self._num_rows))

    def _exchange_rows(
        self, mine: torch.Tensor, rows: torch.Tensor, numbers: list[list[int]], full: torch.Tensor, out: torch.Tensor,
        label: str,
    ) -> Handle:  # fmt: skip
        to, come = numbers[self._comm.rank], [row[self._comm.rank] for row in numbers]
        indices, values = mine.new_empty(sum(come)), rows.new_empty(sum(come), self._width)
        handles = [
            self._comm.all_to_all_uneven(got, given, come, to, label=f"{label}, {what}")
            for got, given, what in ((indices, mine, "which rows"), (values, rows, "rows"))
        ]
        self.sent = [Hop("all_to_all", self._comm, t.nbytes) for t in (mine, rows)]
        length = self._rows_of(full)
        parts = list(zip(torch.split(indices, come), torch.split(values, come), strict=True))
        return Then(handles, lambda: self._add(parts, full, out, self._comm.rank * length, length))

    @staticmethod
    def _finish_empty(full: torch.Tensor, out: torch.Tensor) -> None:
        if not _within(out, full):
            out.zero_()

    def _add(
        self, parts: list[tuple[torch.Tensor, torch.Tensor]], full: torch.Tensor, out: torch.Tensor, first: int,
        num_rows: int,
    ) -> None:  # fmt: skip
        """``out`` = the mean of rows [first, first + num_rows), of which ``parts`` has what ranks 0, 1, ... touched."""
        touched = torch.bincount(torch.cat([indices for indices, _ in parts]) - first, minlength=num_rows)
        some = touched.nonzero().view(-1)
        at = torch.empty_like(touched)
        at[some] = torch.arange(some.numel(), device=some.device)
        total = out.new_zeros(some.numel(), self._width)
        total[touched[some] == len(parts)] = -0.0
        for indices, rows in parts:
            total.index_add_(0, at[indices - first], rows)
        if self._scale != 1.0:
            total.mul_(self._scale)
        if not _within(out, full):  # there other rows are what this rank has of them, 0
            out.zero_()
        out[: num_rows * self._width].view(num_rows, self._width).index_copy_(0, some, total)


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether ``part`` is memory of ``whole``."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
