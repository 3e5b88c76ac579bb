"""Whole tensors for optimizers that need them: what is split over the ranks is brought together within a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zoo.cost.collectives import Hop
from zoo.layout import Split, split_of
from zoo.shard.buckets import Bucket
from zoo.shard.placement.axes import Axes
from zoo.zero.update.segments import Segment


@dataclass(frozen=True)
class _Cut:
    """The tensors of a family of which several ranks along its mesh axes have parts, in an order that all have.

    Attributes:
        lines: the number of each that this rank has a part of, by bucket and index in it.
        num_tensors: on all of these ranks together.
    """

    lines: Mapping[tuple[Bucket, int], int]
    num_tensors: int


class BucketParts:
    """The ``parts=`` of an optimizer with ``needs_whole_tensors`` (the protocol is in ``zoo.optim.whole``).

    Its parameters are segments that lie in one tensor each. Calls are about the buckets of the current piece, which
    are the same on every rank, so that all ranks issue the same collectives whatever segments they have. Sums are taken
    over all chunks in their order at every stage, so that every stage gets the same bits; then, of a tensor that is cut
    along mesh axes too (tensor-parallel matrices, experts that are rows of one tensor), over the ranks along these.
    """

    def __init__(self) -> None:
        self._buckets: Sequence[Bucket] = ()
        self._place: dict[int, tuple[Segment, int, int]] = {}  # of a tensor: segment, index in the bucket, start
        self._cut: dict[Axes, _Cut] = {}

    def adopt(self, segments: Sequence[Segment], buckets: Sequence[Bucket]) -> None:
        """These are the parameters that the optimizer gets, of these buckets. Collective."""
        for segment in segments:
            (piece,) = segment.slices()
            names = segment.bucket.spec.names
            self._place[id(segment.tensor)] = (segment, names.index(piece.name), piece.start)
        for axes, of_family in _families(sorted(buckets, key=lambda b: b.spec.axes)).items():
            self._cut[axes] = _cut_along(axes, of_family)

    def about(self, buckets: Sequence[Bucket]) -> None:
        """The next step updates the segments of these buckets."""
        self._buckets = buckets

    def is_cut(self, bucket: Bucket) -> bool:
        """Whether ranks with other buckets have parts of the tensors of this family: they meet in one piece, all of
        them at once, since they may have cut their buckets otherwise."""
        return self._cut[bucket.routes.axes].num_tensors > 0 if self._cut else False

    def shape(self, param: torch.Tensor) -> torch.Size:
        """The shape of the tensor that ``param`` is a part of."""
        segment, index, _ = self._place[id(param)]
        return torch.Size(segment.bucket.layout.tensors[index].shape)

    def start(self, param: torch.Tensor) -> int:
        """Where in that tensor the part begins, in elements."""
        return self._place[id(param)][2]

    def sum(self, params: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """For each part the sum of the rows of all parts of the same tensor on all ranks. ``rows``: (T, k)."""
        return self._joined(params, rows, lambda table: table.sum(0))

    def largest(self, params: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """As :meth:`sum`, the largest of each column; ``rows`` are not negative."""
        return self._joined(params, rows, lambda table: table.amax(0))

    def _joined(
        self, params: Sequence[torch.Tensor], rows: torch.Tensor, join: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:  # fmt: skip
        found = torch.empty_like(rows)
        places = [self._place[id(p)] for p in params]
        for axes, buckets in _families(self._buckets).items():
            line = {(b, i): n for n, (b, i) in enumerate((b, i) for b in buckets for i in range(len(b.spec.names)))}
            # (p, tensors, k): what each chunk has of each tensor of the buckets, 0 for none
            table = rows.new_zeros(axes.shard.size, len(line), rows.shape[1], device=buckets[0].device)
            mine = [(n, s, line[s.bucket, i]) for n, (s, i, _) in enumerate(places) if (s.bucket, i) in line]
            for n, segment, at in mine:
                table[segment.chunk, at] = rows[n]
            if buckets[0].placements.states.is_split and axes.shard.size > 1:
                own = table[axes.place].clone().view(-1)
                axes.shard.all_gather(table.view(-1), own, label="sums over tensors for the optimizer").wait()
            whole = self._over_parts(axes, line, join(table), join)
            for n, _, at in mine:
                found[n] = whole[at]
        return found

    def _over_parts(
        self, axes: Axes, line: Mapping[tuple[Bucket, int], int], mine: torch.Tensor,
        join: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """(tensors, k) of all parts along the mesh axes of a family, of what this rank's part has."""
        cut, comm = self._cut[axes], axes.parts
        if not cut.num_tensors or comm is None:
            return mine
        table = mine.new_zeros(comm.size, cut.num_tensors, mine.shape[1])
        for tensor, at in cut.lines.items():
            table[comm.rank, at] = mine[line[tensor]]
        own = table[comm.rank].clone().view(-1)
        comm.all_gather(table.view(-1), own, label="sums over parts of tensors for the optimizer").wait()
        joined = join(table)
        for tensor, at in cut.lines.items():
            mine[line[tensor]] = joined[at]
        return mine

    def hops(self, buckets: Sequence[Bucket], sums: int) -> list[Hop]:
        """The collectives of a step of an optimizer that asks once for sums, or the largest, of ``sums`` columns."""
        found = []
        for axes, of_family in _families(buckets).items() if sums else ():
            count = sum(len(b.spec.names) for b in of_family)
            if of_family[0].placements.states.is_split:
                found.append(Hop("all_gather", axes.shard, 8 * axes.shard.size * count * sums))
            if axes.parts is not None and (num_cut := self._cut[axes].num_tensors):
                found.append(Hop("all_gather", axes.parts, 8 * axes.parts.size * num_cut * sums))
        return found

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
            flat[segment.bucket][segment.first : segment.first + value.numel()] = value
        handles = []
        for bucket, buffer in flat.items():
            if bucket.placements.states.is_split:
                mine = buffer[slice(*bucket.own_range)]
                handles.append(bucket.shard_group.all_gather(buffer, mine, label=f"directions of {bucket.label}"))
        for handle in handles:
            handle.wait()
        found = []
        for param in params:
            segment, index, _ = self._place[id(param)]
            offset, tensor = segment.bucket.layout.offsets[index], segment.bucket.layout.tensors[index]
            found.append(flat[segment.bucket][offset : offset + tensor.numel].view(tensor.shape))
        return found


def cannot_be_whole(optimizer: Any, buckets: Sequence[Bucket]) -> NotImplementedError | None:
    """What is wrong with parts of tensors, along mesh axes, for an optimizer that would need all of a tensor."""
    if not getattr(optimizer, "needs_whole_tensors", False) or getattr(optimizer, "adds_up_parts", False):
        return None
    named = ((b, name, p) for b in buckets for name, p in zip(b.spec.names, b.spec.parameters, strict=True))
    part = next(((b, name) for b, name, p in named if is_part(split_of(p))), None)
    if part is None:
        return None
    return NotImplementedError(
        f"{optimizer.__name__} needs whole tensors, and {part[1]!r} is a part along the mesh axes {part[0].spec.axes}. "
        "Use an elementwise optimizer, or one that adds up what parts measure (zoo.optim.Lamb, OnebitLamb)."
    )


def is_part(split: Split) -> bool:
    """Whether a parameter is less than a tensor of the whole model."""
    return split.box is not None and split.shape is not None and split.box.numel < math.prod(split.shape)


def _families(buckets: Iterable[Bucket]) -> dict[Axes, list[Bucket]]:
    """Buckets that travel between the same ranks, in their order."""
    found: dict[Axes, list[Bucket]] = {}
    for bucket in buckets:
        found.setdefault(bucket.routes.axes, []).append(bucket)
    return found


def _cut_along(axes: Axes, buckets: Sequence[Bucket]) -> _Cut:
    """The tensors of a family that are cut. Collective over the axes along which they may be."""
    if axes.parts is None or axes.parts.size == 1:
        return _Cut({}, 0)
    called = {
        (bucket, index): bucket.logical(name)[0]
        for bucket in buckets
        for index, name in enumerate(bucket.spec.names)
        if is_part(bucket.logical(name)[1])
    }
    ranks = Counter(name for of_rank in axes.parts.all_gather_object(sorted(called.values())) for name in of_rank)
    lines = {name: line for line, name in enumerate(sorted(name for name, count in ranks.items() if count > 1))}
    return _Cut({tensor: lines[name] for tensor, name in called.items() if name in lines}, len(lines))
