"""Law 1: gather ∘ shard = identity, for every layout; and resharding by any path is the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.layout import FlatLayout, LogicalTensor, Mesh, Sharding, reshard, runs_of

shapes = st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 13]), max_size=3).map(tuple), min_size=1, max_size=6)


@st.composite
def shardings(draw: st.DrawFn, tensors: list[LogicalTensor]) -> Sharding:
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    mesh = Mesh(("outer", "inner")[: len(sizes)], sizes)
    axes = tuple(draw(st.permutations(mesh.axes)))[: draw(st.integers(0, len(sizes)))]
    count = 1
    for axis in axes:
        count *= mesh.sizes[mesh.axes.index(axis)]
    align = draw(st.sampled_from([1, 2, 8]))
    order = draw(st.permutations(tensors))
    return Sharding(FlatLayout.pack(order, align=align, multiple=align * count), mesh, axes)


def tensors_of(given_shapes: list[tuple[int, ...]]) -> list[LogicalTensor]:
    return [LogicalTensor(name=f"t{i}", shape=shape) for i, shape in enumerate(given_shapes)]


def fill(sharding: Sharding) -> list[list[Any]]:
    """Every rank's shard, each element being (name, index), padding None."""
    shards = []
    for rank in range(sharding.mesh.world_size):
        low, high = sharding.range_of(rank)
        shard: list[Any] = [None] * (high - low)
        for piece in sharding.layout.slices(low, high):
            for k in range(piece.length):
                shard[piece.offset + k] = (piece.name, piece.start + k)
        shards.append(shard)
    return shards


def move(shards: list[list[Any]], source: Sharding, target: Sharding) -> list[list[Any]]:
    out = [[None] * (target.range_of(r)[1] - target.range_of(r)[0]) for r in range(target.mesh.world_size)]
    for dst_rank, dst, src_rank, src, length in runs_of(reshard(source, target)):
        for k in range(length):
            assert out[dst_rank][dst + k] is None, "written twice"
            out[dst_rank][dst + k] = shards[src_rank][src + k]
    return out


@examples(times=5)
@given(shapes=shapes, data=st.data())
def test_gathering_all_shards_gives_every_element_once(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    tensors = tensors_of(shapes)
    sharding = data.draw(shardings(tensors))
    by_index = {sharding.shard_index(r): shard for r, shard in enumerate(fill(sharding))}
    flat = [x for index in range(sharding.num_shards) for x in by_index[index]]
    for tensor, offset in zip(sharding.layout.tensors, sharding.layout.offsets, strict=True):
        assert flat[offset : offset + tensor.numel] == [(tensor.name, k) for k in range(tensor.numel)]
    assert sum(x is not None for x in flat) == sum(tensor.numel for tensor in tensors)


@examples(times=5)
@given(shapes=shapes, data=st.data())
def test_resharding_fills_any_target_from_any_source(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    tensors = tensors_of(shapes)
    source, middle, target = (data.draw(shardings(tensors)) for _ in range(3))
    assert move(fill(source), source, target) == fill(target)
    assert move(move(fill(source), source, middle), middle, target) == fill(target)


@examples(times=5)
@given(shapes=shapes, data=st.data())
def test_slices_of_a_part_are_the_elements_of_that_part(shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    layout = FlatLayout.pack(tensors_of(shapes), align=data.draw(st.integers(1, 5)))
    low = data.draw(st.integers(0, layout.size))
    high = data.draw(st.integers(low, layout.size))
    whole = [None] * layout.size
    for piece in layout.slices():
        for k in range(piece.length):
            whole[piece.offset + k] = (piece.name, piece.start + k)
    part: list[Any] = [None] * (high - low)
    for piece in layout.slices(low, high):
        for k in range(piece.length):
            part[piece.offset + k] = (piece.name, piece.start + k)
    assert part == whole[low:high]
