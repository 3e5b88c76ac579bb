"""Small facts and user errors; the laws are in tests/laws/test_layouts.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zoo.layout import Box, Copy, FlatLayout, Held, LogicalTensor, Mesh, Piece, Sharding, Slice, reshard

W, B = LogicalTensor(name="w", shape=(3, 5)), LogicalTensor(name="b", shape=(5,))


def test_packing_aligns_and_pads() -> None:
    layout = FlatLayout.pack([W, B], align=4, multiple=8)
    assert layout.offsets == (0, 16)
    assert layout.size == 24
    assert layout.slices(14, 18) == [Slice("w", 14, 1, 0), Slice("b", 0, 2, 2)]


def test_a_scalar_has_one_element_and_an_empty_tensor_none() -> None:
    assert LogicalTensor(name="s", shape=()).numel == 1
    empty = LogicalTensor(name="e", shape=(0, 3))
    assert empty.numel == 0
    assert FlatLayout.pack([empty, B]).slices() == [Slice("b", 0, 5, 0)]


def test_shards_of_a_mesh_count_in_row_major_order_of_the_chosen_axes() -> None:
    mesh = Mesh(("node", "local"), (2, 3))
    layout = FlatLayout.pack([W], multiple=6)
    assert [Sharding(layout, mesh, ("node", "local")).shard_index(r) for r in range(6)] == [0, 1, 2, 3, 4, 5]
    assert [Sharding(layout, mesh, ("local", "node")).shard_index(r) for r in range(6)] == [0, 2, 4, 1, 3, 5]
    assert [Sharding(layout, mesh, ("local",)).shard_index(r) for r in range(6)] == [0, 1, 2, 0, 1, 2]
    assert Sharding(layout, mesh).range_of(5) == (0, 18)


def test_resharding_prefers_what_is_already_there_and_takes_turns() -> None:
    layout = FlatLayout.pack([B])
    replicated = Sharding(layout, Mesh(("data",), (2,)))
    whole = Box((0,), (5,))
    copies = [Copy(0, 0, 0, 0, "b", whole, (1,), (1,)), Copy(1, 0, 1, 0, "b", whole, (1,), (1,))]
    assert reshard(replicated, replicated) == copies
    wider = Sharding(layout, Mesh(("data",), (4,)))
    assert [c.src_rank for c in reshard(replicated, wider)] == [0, 1, 0, 1]


def test_user_errors_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"shape \(3, -1\)"):
        LogicalTensor(name="x", shape=(3, -1))
    with pytest.raises(ValueError, match="more than once: w"):
        FlatLayout.pack([W, W])
    with pytest.raises(ValueError, match="align=0"):
        FlatLayout.pack([W], align=0)
    layout = FlatLayout.pack([W])
    with pytest.raises(ValueError, match=r"15 elements does not split into 2.*multiple=2"):
        layout.shard_range(0, 2)
    with pytest.raises(ValueError, match="shard index 3"):
        layout.shard_range(3, 3)
    with pytest.raises(ValueError, match=r"\[4, 99\)"):
        layout.slices(4, 99)
    with pytest.raises(ValueError, match=r"'x' has shape \(3,\), in which there is no box \[2:4\]"):
        LogicalTensor(name="x", shape=(3,), box=Box((2,), (2,)))
    with pytest.raises(ValueError, match=r"in which there is no box \[0:1\]"):
        LogicalTensor(name="x", shape=(3, 3), box=Box((0,), (1,)))
    with pytest.raises(ValueError, match=r"offsets \(0,\) and sizes \(1, 2\)"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match=r"\[0, 7\) is not a run of a box of 6 elements"):
        Box.whole((2, 3)).run(0, 7)
    with pytest.raises(ValueError, match="same number"):
        Box.whole((2, 3)).intersection(Box.whole((2,)))
    with pytest.raises(ValueError, match="distinct axis"):
        Mesh(("a", "a"), (1, 2))
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh(("a",), (0,))
    with pytest.raises(ValueError, match="outside this mesh of 2"):
        Mesh(("a",), (2,)).coordinates(2)
    with pytest.raises(ValueError, match="cannot shard over"):
        Sharding(layout, Mesh(("a",), (1,)), ("b",))
    one = Mesh(("a",), (1,))
    with pytest.raises(ValueError, match=r"cannot reshard 'b'.*no such tensor"):
        reshard(Sharding(layout, one), Sharding(FlatLayout.pack([W, B]), one))
    other = LogicalTensor(name="w", shape=(5, 3))
    with pytest.raises(ValueError, match=r"cannot reshard 'w'.*\(5, 3\).*\(3, 5\)"):
        reshard(Sharding(layout, one), Sharding(FlatLayout.pack([other]), one))
    part = Held({"w": (3, 5)}, [[Piece("w", Box((0, 0), (3, 4)), 0)]])
    with pytest.raises(ValueError, match=r"rank 0 wants box \[0:3, 0:5\].*holds box \[0:3, 4:5\]"):
        reshard(part, Sharding(layout, one))


def test_layout_does_not_import_torch() -> None:
    code = "import zoo.layout, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
