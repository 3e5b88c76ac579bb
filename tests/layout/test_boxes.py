"""Boxes, runs and the copies between placements, against numpy on every element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from tests.profiles import examples

from zoo.layout import Box, FlatLayout, Held, Intervals, LogicalTensor, Mesh, Piece, Sharding, reshard, runs_of

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=4).map(tuple)


def part(array: Any, box: Box) -> Any:
    return array[(*(slice(low, high) for low, high in zip(box.offsets, box.stops, strict=True)), ...)]


def numbers(shape: tuple[int, ...]) -> Any:
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ranges = [sorted((draw(st.integers(0, s)), draw(st.integers(0, s)))) for s in shape]
    return Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))


@st.composite
def runs(draw: st.DrawFn, numel: int) -> tuple[int, int]:
    low, high = sorted((draw(st.integers(0, numel)), draw(st.integers(0, numel))))
    return low, high


@examples(times=5)
@given(shape=shapes, data=st.data())
def test_a_run_is_at_most_2d_minus_1_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    outer = data.draw(boxes(shape))
    start, stop = data.draw(runs(outer.numel))
    found = outer.run(start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    flat = part(numbers(shape), outer).ravel()
    got = [value for box in found for value in part(numbers(shape), box).ravel().tolist()]
    assert got == flat[start:stop].tolist()
    assert all(box.numel and box.fits(shape) for box in found)
    # Each box is one run itself.
    for box in found:
        first = outer.number_of(box.offsets)
        assert part(numbers(shape), box).ravel().tolist() == flat[first : first + box.numel].tolist()


def test_the_bound_is_reached() -> None:
    for d in range(1, 5):
        box = Box.whole((3,) * d)
        assert len(box.run(1, box.numel - 1)) == 2 * d - 1


@examples(times=5)
@given(shape=shapes, data=st.data())
def test_intersection_and_difference_are_those_of_sets(shape: tuple[int, ...], data: st.DataObject) -> None:
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    masks = []
    for box in (one, other):
        mask = np.zeros(shape, dtype=bool)
        part(mask, box)[...] = True
        masks.append(mask)
    common = one.intersection(other)
    found = set() if common is None else set(part(numbers(shape), common).ravel().tolist())
    assert found == set(numbers(shape)[masks[0] & masks[1]].tolist())
    assert common is None or common.numel
    rest = one.minus(other)
    assert len(rest) <= max(2 * len(shape), 1)
    listed = [value for box in rest for value in part(numbers(shape), box).ravel().tolist()]
    assert sorted(listed) == sorted(numbers(shape)[masks[0] & ~masks[1]].tolist())


@examples(times=5)
@given(shape=shapes, data=st.data())
def test_what_of_a_box_lies_in_runs(shape: tuple[int, ...], data: st.DataObject) -> None:
    outer, box = data.draw(boxes(shape)), data.draw(boxes(shape))
    given_runs = data.draw(st.lists(runs(outer.numel), max_size=3))
    found = box.in_runs(outer, given_runs)
    flat, inside = part(numbers(shape), outer).ravel(), set(part(numbers(shape), box).ravel().tolist())
    expected = [value for start, stop in given_runs for value in flat[start:stop].tolist() if value in inside]
    assert [value for b in found for value in part(numbers(shape), b).ravel().tolist()] == expected
    assert len(found) <= len(given_runs) * max(2 * len(shape) - 1, 1)


@examples(times=5)
@given(
    drawn=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=12), start=st.integers(0, 25),
    length=st.integers(1, 9),
)  # fmt: skip
def test_intervals_that_meet_are_found(drawn: list[tuple[int, int]], start: int, length: int) -> None:
    intervals = [(low, low + size) for low, size in drawn]
    found = list(Intervals(intervals).meeting(start, start + length))
    expected = [i for i, (low, high) in enumerate(intervals) if max(low, start) < min(high, start + length)]
    assert sorted(found) == expected
    assert [intervals[i][0] for i in found] == sorted(intervals[i][0] for i in found)


@st.composite
def placements(draw: st.DrawFn, given_shapes: dict[str, tuple[int, ...]]) -> Held:
    """Each tensor cut into a grid over tensor-parallel ranks, each part flat over some more, all of it repeated."""
    split, shards, copies = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dims = {name: draw(st.integers(0, len(shape))) for name, shape in given_shapes.items()}
    order = draw(st.permutations(list(given_shapes)))
    align = draw(st.sampled_from([1, 4]))
    pieces: list[list[Piece]] = []
    for rank in range(split * shards * copies):
        tensors = []
        for name in order:
            shape, dim, box = given_shapes[name], dims[name], None
            if dim < len(shape):
                which = rank % split
                low, high = shape[dim] * which // split, shape[dim] * (which + 1) // split
                box = Box(
                    tuple(low if i == dim else 0 for i in range(len(shape))),
                    tuple(high - low if i == dim else s for i, s in enumerate(shape)),
                )
            tensors.append(LogicalTensor(name=name, shape=shape, box=box))
        layout = FlatLayout.pack(tensors, align=align, multiple=shards)
        pieces.append(layout.pieces(*layout.shard_range(rank // split % shards, shards)))
    return Held(given_shapes, pieces)


def buffers(placed: Held, *, filled: bool) -> list[Any]:
    """Every rank's buffer: each element its number in its tensor and the tensor's place; padding and unfilled -1."""
    found = []
    for rank in range(placed.num_ranks):
        pieces = placed.pieces_of(rank)
        buffer = np.full(max((piece.stop for piece in pieces), default=0), -1)
        for piece in pieces if filled else []:
            which = list(placed.shapes).index(piece.name)
            values = part(numbers(placed.shapes[piece.name]), piece.box).ravel() + 10_000 * which
            assert (buffer[piece.offset : piece.stop] == -1).all()
            buffer[piece.offset : piece.stop] = values
        found.append(buffer)
    return found


@examples(times=5)
@given(given_shapes=st.lists(shapes, min_size=1, max_size=3), data=st.data())
def test_any_placement_is_filled_from_any_other(given_shapes: list[tuple[int, ...]], data: st.DataObject) -> None:
    named = {f"t{i}": shape for i, shape in enumerate(given_shapes)}
    source, target = data.draw(placements(named)), data.draw(placements(named))
    before, expected = buffers(source, filled=True), buffers(target, filled=True)
    copies = reshard(source, target)

    strided = buffers(target, filled=False)
    for c in copies:
        step = strided[0].itemsize
        views = [
            as_strided(buffer[rank][offset:], c.box.sizes, tuple(step * s for s in strides))
            for buffer, rank, offset, strides in (
                (strided, c.dst_rank, c.dst_offset, c.dst_strides), (before, c.src_rank, c.src_offset, c.src_strides)
            )
        ]  # fmt: skip
        assert (views[0] == -1).all(), "written twice"
        views[0][...] = views[1]
        held = [rank for rank in range(source.num_ranks) for p in source.pieces_of(rank) if p.name == c.name
                and p.box.intersection(c.box)]  # fmt: skip
        assert c.src_rank == c.dst_rank or c.dst_rank not in held
    joined = buffers(target, filled=False)
    for dst_rank, dst, src_rank, src, length in runs_of(copies):
        joined[dst_rank][dst : dst + length] = before[src_rank][src : src + length]
    for rank, wanted in enumerate(expected):
        assert (strided[rank] == wanted).all()
        assert (joined[rank] == wanted).all()


def test_shards_of_whole_tensors_are_copied_in_one_run_each() -> None:
    tensors = [LogicalTensor(name="w", shape=(5, 7, 3))]
    before = Sharding(FlatLayout.pack(tensors, multiple=3), Mesh(("data",), (3,)), ("data",))
    after = Sharding(FlatLayout.pack(tensors, multiple=5), Mesh(("data",), (5,)), ("data",))
    assert runs_of(reshard(before, after)) == [
        (0, 0, 0, 0, 21), (1, 0, 0, 21, 14), (1, 14, 1, 0, 7), (2, 0, 1, 7, 21), (3, 0, 1, 28, 7), (3, 7, 2, 0, 14),
        (4, 0, 2, 14, 21),
    ]  # fmt: skip


def test_an_expert_is_a_box_with_its_global_index() -> None:
    experts = [[LogicalTensor(name="w", shape=(4, 2, 3), box=Box((e, 0, 0), (2, 2, 3)))] for e in (0, 2)]
    before = Held({"w": (4, 2, 3)}, [FlatLayout.pack(tensors).pieces() for tensors in experts])
    after = Held({"w": (4, 2, 3)}, [[Piece("w", Box((e, 0, 0), (1, 2, 3)), 0)] for e in range(4)])
    assert runs_of(reshard(before, after)) == [(0, 0, 0, 0, 6), (1, 0, 0, 6, 6), (2, 0, 1, 0, 6), (3, 0, 1, 6, 6)]
