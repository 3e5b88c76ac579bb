"""Slices that are boxes of a tensor: columns of a matrix, parts of experts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpointing.test_checkpoints import _change
from tests.profiles import examples

from zoo import sim
from zoo.checkpointing import CheckpointError, load, save, zero_to_fp32
from zoo.checkpointing.comparing import compare
from zoo.checkpointing.format.index import Index
from zoo.checkpointing.resharding import reshard
from zoo.comm import Communicator
from zoo.layout import Box, StateSlice, tiles


def part(box: Box, shape: tuple[int, ...], role: str = "parameter") -> StateSlice:
    """A slice of "w", which has the number of each element as its value."""
    whole = torch.arange(Box.whole(shape).numel, dtype=torch.float32).view(shape)
    value = whole[(*(slice(low, high) for low, high in zip(box.offsets, box.stops, strict=True)), ...)].reshape(-1)
    value = value if role == "parameter" else -value.double()
    return StateSlice("w", role, Box.whole(shape).number_of(box.offsets), box.numel, shape, value, box)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor, cut again and again in some dim."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, box.sizes[dim] - 1))
        below = Box(box.offsets, (*box.sizes[:dim], at, *box.sizes[dim + 1 :]))
        boxes += [below, *box.minus(below)]
    return shape, boxes


def write(root: Path, shape: tuple[int, ...], boxes: list[Box], ranks: int, seed: int = 0) -> None:
    owner = np.random.default_rng(seed).integers(0, ranks, len(boxes)).tolist()

    def job(rank: int) -> None:
        mine = [part(box, shape, role) for role in ("parameter", "exp_avg")
                for box, of in zip(boxes, owner, strict=True) if of == rank]  # fmt: skip
        save(root, "one", mine, comm=Communicator())

    sim.run(ranks, job)


@examples(times=2)
@given(cut=cuts(), ranks=st.integers(1, 4), data=st.data())
def test_any_run_and_any_box_is_read_of_any_boxes(cut: Any, ranks: int, data: st.DataObject) -> None:
    shape, boxes = cut
    expected = torch.arange(Box.whole(shape).numel, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shape, boxes, ranks, data.draw(st.integers(0, 9)))
        with load(folder) as found:
            assert torch.equal(found.tensor("w").reshape(-1), expected)
            for _ in range(5):
                low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(expected))] * 2)))
                assert torch.equal(found.read("w", "exp_avg", low, high - low), -expected[low:high].double())
                ranges = [sorted(data.draw(st.tuples(st.integers(0, d), st.integers(0, d)))) for d in shape]
                box = Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
                wanted = expected.view(shape)[tuple(slice(low, high) for low, high in ranges)]
                assert torch.equal(found.read_box("w", "parameter", box), wanted)
                assert torch.equal(found.read("w", "parameter", box, box.numel), wanted.reshape(-1))
            alone = zero_to_fp32.Checkpoint(folder)
            low, high = sorted(data.draw(st.tuples(*[st.integers(0, len(expected))] * 2)))
            assert torch.equal(alone.read("w", "parameter", low, high - low), expected[low:high])
            alone.close()
            with tempfile.TemporaryDirectory() as other:
                reshard(found, other, 3)
                with load(other) as new:
                    assert list(compare(found, new)) == []


@given(cut=cuts(), data=st.data())
def test_boxes_that_are_not_the_tensor_are_refused(cut: Any, data: st.DataObject) -> None:
    shape, boxes = cut
    number = data.draw(st.integers(0, len(boxes) - 1))
    if data.draw(st.booleans()):
        boxes.pop(number)
    else:
        boxes[number] = data.draw(st.sampled_from([Box.whole(shape), boxes[number - 1]]))
    right = tiles(boxes, shape)
    with tempfile.TemporaryDirectory() as folder:
        said = ""
        try:
            write(Path(folder), shape, boxes, 4)
        except sim.RankError as error:
            said = str(error)
        assert (said == "") is (right or not boxes)
        if said:
            assert "'w'" in said


def columns(root: Path) -> None:
    """A matrix in two halves of its columns, and some rows of the second half on a third rank."""
    write(root, (8, 6), [Box((0, 0), (8, 3)), Box((0, 3), (5, 3)), Box((5, 3), (3, 3))], 3)


def test_a_box_is_one_piece(tmp_path: Path) -> None:
    columns(tmp_path)
    index = load(tmp_path).index
    assert len(index.columns["state"]) == 6
    assert sorted(index.columns["length"].tolist()) == [9, 9, 15, 15, 24, 24]


def _to(name: str, row: int, value: int) -> Callable[[Index], object]:
    return lambda index: index.columns[name].__setitem__(row, value)


DAMAGE: dict[str, tuple[Callable[[Index], object], str]] = {
    "outside": (_to("extents", 0, 7), "does not fit its|is none"),
    "negative": (_to("extents", 0, -1), "that is none"),
    "huge": (_to("extents", 2, 1 << 62), "does not fit its"),
    "past the end": (_to("box", 0, (1 << 31) - 1), "that is none"),
    "a run": (_to("box", 0, -1), "have not each of its elements exactly once"),
    "another": (_to("box", 0, 4), "does not fit its|exactly once"),
    "length": (_to("length", 0, 1), "does not fit its"),
    "start": (_to("start", 1, 2), "does not fit its"),
    "cut": (lambda i: i.columns.update(extents=i.columns["extents"][:-1]), "that is none"),
    "short": (lambda i: i.columns.update(box=i.columns["box"][:-1]), "different lengths"),
}


def _read_alone(root: Path) -> None:
    for role in ("parameter", "exp_avg"):
        zero_to_fp32.Checkpoint(root).read("w", role, 0, 48)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_of_boxes_is_named(tmp_path: Path, kind: str) -> None:
    columns(tmp_path)
    change, said = DAMAGE[kind]
    _change(tmp_path, change)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path, "one")
    with pytest.raises(ValueError, match=r"box|once|different lengths|twice|outside"):
        _read_alone(tmp_path)


@pytest.mark.parametrize("box", [Box((0, 0), (8, 2)), Box((0, 4), (8, 3)), Box((1, 0), (8, 3)), Box((0,), (24,))])
def test_a_slice_whose_box_does_not_fit_is_refused(tmp_path: Path, box: Box) -> None:
    wrong = replace(part(Box((0, 0), (8, 3)), (8, 6)), box=box)
    with pytest.raises(CheckpointError, match=r"'w', of shape \(8, 6\), is given as the box"):
        save(tmp_path, "one", [wrong])
