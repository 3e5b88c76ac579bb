"""Resharding: which elements go from where to where when a placement changes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

from zoo.layout.flat import Slice
from zoo.layout.mesh import Sharding


@dataclass(frozen=True, order=True)
class Copy:
    """Copy ``length`` elements of ``name`` from offset ``src_offset`` of ``src_rank``'s shard to ``dst_rank``'s."""

    dst_rank: int
    dst_offset: int
    src_rank: int
    src_offset: int
    length: int
    name: str


def reshard(source: Sharding, target: Sharding) -> list[Copy]:
    """The copies that fill every shard of ``target`` from the shards of ``source``.

    The two may differ in everything but the shapes of the tensors they share: order and padding of the layout, mesh,
    axes, world size. Every element of a tensor in ``target`` is written exactly once on each rank that holds it. Where
    several source ranks hold an element, the receiving rank itself is preferred, then the replica whose turn it is
    (replicas take turns by destination rank, so that no source rank serves everyone).

    Raises:
        ValueError: ``target`` needs a tensor that ``source`` does not hold, or holds with another number of elements.
    """
    have = {t.name: t.numel for t in source.layout.tensors}
    for tensor in target.layout.tensors:
        if have.get(tensor.name) != tensor.numel:
            raise ValueError(
                f"cannot reshard {tensor.name!r}: the target wants {tensor.numel} elements, the source holds "
                f"{have.get(tensor.name, 'no such tensor')}."
            )
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in range(source.mesh.world_size):
        holders[source.shard_index(rank)].append(rank)
    pieces = _pieces_by_name(source)
    copies: list[Copy] = []
    for dst in range(target.mesh.world_size):
        for wanted in target.slices_of(dst):
            copies += _fill(dst, wanted, pieces[wanted.name], holders)
    return copies


def _pieces_by_name(source: Sharding) -> dict[str, list[tuple[Slice, int]]]:
    # In shard order the pieces of one tensor come in order of their start.
    pieces: dict[str, list[tuple[Slice, int]]] = defaultdict(list)
    for index in range(source.num_shards):
        for piece in source.layout.slices(*source.layout.shard_range(index, source.num_shards)):
            pieces[piece.name].append((piece, index))
    return pieces


def _fill(dst: int, wanted: Slice, pieces: list[tuple[Slice, int]], holders: dict[int, list[int]]) -> list[Copy]:
    copies = []
    first = max(bisect.bisect_right(pieces, wanted.start, key=lambda p: p[0].start) - 1, 0)
    for piece, index in pieces[first:]:
        if piece.start >= wanted.stop:
            break
        low, high = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        ranks = holders[index]
        src = dst if dst in ranks else ranks[dst % len(ranks)]
        copies.append(
            Copy(
                dst, wanted.offset + low - wanted.start, src, piece.offset + low - piece.start, high - low, wanted.name
            )
        )
    return copies
