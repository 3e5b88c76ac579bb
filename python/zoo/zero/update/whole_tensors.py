"""Whole tensors for optimizers that need them: what is split over the ranks is brought together within a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zoo.comm import Communicator
from zoo.zero.collectives.routes import Hop
from zoo.zero.sharding.buckets import Bucket
from zoo.zero.update.segments import Segment


class BucketParts:
    """The ``parts=`` of an optimizer with ``needs_whole_tensors`` (the protocol is in ``zoo.optim.whole``).

    Its parameters are segments that lie in one tensor each. Calls are about the buckets of the current piece, which
    are the same on every rank, so that all ranks issue the same collectives whatever segments they have. Sums are taken
    over all chunks in their order at every stage, so that every stage gets the same bits.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buckets: Sequence[Bucket] = ()
        self._place: dict[int, tuple[Segment, int, int]] = {}  # of a tensor: segment, index in the bucket, start

    def adopt(self, segments: Sequence[Segment]) -> None:
        """These are the parameters that the optimizer gets."""
        for segment in segments:
            (piece,) = segment.slices()
            names = segment.bucket.spec.names
            self._place[id(segment.tensor)] = (segment, names.index(piece.name), piece.start)

    def about(self, buckets: Sequence[Bucket]) -> None:
        """The next step updates the segments of these buckets."""
        self._buckets = buckets

    def shape(self, param: torch.Tensor) -> torch.Size:
        """The shape of the tensor that ``param`` is a part of."""
        segment, index, _ = self._place[id(param)]
        return torch.Size(segment.bucket.layout.tensors[index].shape)

    def start(self, param: torch.Tensor) -> int:
        """Where in that tensor the part begins, in elements."""
        return self._place[id(param)][2]

    def sum(self, params: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """For each part the sum of the rows of all parts of the same tensor on all ranks. ``rows``: (T, k)."""
        table, lines = self._table(params, rows)
        return table.sum(0)[lines]

    def largest(self, params: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """As :meth:`sum`, the largest of each column; ``rows`` are not negative."""
        table, lines = self._table(params, rows)
        return table.amax(0)[lines]

    def _table(self, params: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """(p, tensors, k): what each chunk has of each tensor of the buckets, 0 for none; the line of each part."""
        first, count = {}, 0
        for bucket in self._buckets:
            first[bucket] = count
            count += len(bucket.spec.names)
        num_chunks, width = self._comm.size, rows.shape[1]
        table = rows.new_zeros(num_chunks, count, width)
        places = [self._place[id(p)] for p in params]
        lines = [first[segment.bucket] + index for segment, index, _ in places]
        for (segment, _, _), line, row in zip(places, lines, rows, strict=True):
            table[segment.chunk, line] = row
        if self._split and num_chunks > 1:
            mine = table[self._comm.rank].clone().view(-1)
            self._comm.all_gather(table.view(-1), mine, label="sums over tensors for the optimizer").wait()
        return table, lines

    def hops(self, buckets: Sequence[Bucket], sums: int) -> list[Hop]:
        """The collectives of a step of an optimizer that asks once for sums, or the largest, of ``sums`` columns."""
        split = any(b.placements.states.is_split for b in buckets)
        count = sum(len(b.spec.names) for b in buckets)
        return [Hop("all_gather", self._comm, 8 * self._comm.size * count * sums)] if split and sums else []

    def whole(
        self, groups: Sequence[int], params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """For each part the tensor, in its shape, of which ``values`` has the parts."""
        wanted = [b for b in self._buckets if any(g in groups for g in b.spec.groups)]
        if not wanted:
            return []
        device, dtype = wanted[0].device, torch.bfloat16
        if values:
            dtype = values[0].dtype
        flat = {b: torch.zeros(b.layout.size, dtype=dtype, device=device) for b in wanted}
        for param, value in zip(params, values, strict=True):
            segment, _, _ = self._place[id(param)]
            base = segment.chunk * (segment.bucket.layout.size // segment.bucket.num_chunks)
            flat[segment.bucket][base + segment.start : base + segment.stop] = value
        if self._split:
            handles = []
            for bucket, buffer in flat.items():
                low, high = bucket.own_range()
                handles.append(self._comm.all_gather(buffer, buffer[low:high], label=f"directions of {bucket.label}"))
            for handle in handles:
                handle.wait()
        found = []
        for param in params:
            segment, index, _ = self._place[id(param)]
            offset, tensor = segment.bucket.layout.offsets[index], segment.bucket.layout.tensors[index]
            found.append(flat[segment.bucket][offset : offset + tensor.numel].view(tensor.shape))
        return found

    @property
    def _split(self) -> bool:
        return any(b.placements.states.is_split for b in self._buckets)
