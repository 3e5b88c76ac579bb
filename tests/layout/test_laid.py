"""Parts that are several boxes of a tensor, against numpy on every element."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.test_boxes import boxes, numbers, part
from tests.profiles import examples

from zoo.layout import Box, Boxes, Laid, boxes_of, declare_split, split_of


@st.composite
def cut(draw: st.DrawFn, here: Box, depth: int) -> list[Box]:
    """Boxes that tile ``here``: cut along a dim, and again."""
    dims = [d for d, size in enumerate(here.sizes) if size > 1]
    if not dims or depth == 0 or draw(st.booleans()):
        return [here]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, here.sizes[dim] - 1))
    low = Box(here.offsets, (*here.sizes[:dim], at, *here.sizes[dim + 1 :]))
    high = Box(
        (*here.offsets[:dim], here.offsets[dim] + at, *here.offsets[dim + 1 :]),
        (*here.sizes[:dim], here.sizes[dim] - at, *here.sizes[dim + 1 :]),
    )
    return draw(cut(low, depth - 1)) + draw(cut(high, depth - 1))


@st.composite
def laid_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Boxes]:
    """A whole shape, and a part of several boxes of it, some of them perhaps twice."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    shape = tuple(size + draw(st.integers(0, 3)) for size in sizes)
    laid = []
    for here in draw(cut(Box.whole(sizes), 3)):
        offsets = tuple(draw(st.integers(0, d - s)) for d, s in zip(shape, here.sizes, strict=True))
        laid.append(Laid(here.offsets, Box(offsets, here.sizes)))
    return shape, Boxes(sizes, tuple(draw(st.permutations(laid))))


def values_of(part_of: Boxes, whole: Any) -> Any:
    made = np.full(part_of.sizes, -1)
    for laid in part_of.laid:
        part(made, laid.here)[...] = part(whole, laid.box)
    return made


@examples(times=20)
@given(made=laid_boxes(), data=st.data())
def test_a_run_of_the_part_is_boxes_of_the_tensor_in_its_order(
    made: tuple[tuple[int, ...], Boxes], data: st.DataObject
) -> None:
    shape, boxes_here = made
    whole = numbers(shape)
    flat = values_of(boxes_here, whole).ravel()
    start, stop = sorted((data.draw(st.integers(0, flat.size)), data.draw(st.integers(0, flat.size))))
    found = boxes_here.run(start, stop)
    assert boxes_here.fits(shape)
    assert [v for box in found for v in part(whole, box).ravel().tolist()] == flat[start:stop].tolist()
    assert sum(box.numel for box in found) == stop - start


@examples(times=5)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), data=st.data())
def test_one_box_is_what_a_box_is(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = data.draw(boxes(shape).filter(lambda b: b.numel > 0))
    alone = Boxes(box.sizes, boxes_of(box))
    assert alone.run(0, alone.numel) == box.run(0, box.numel)


def test_heads_of_a_fused_projection_cost_a_box_each() -> None:
    """Rank 1 of 2 of queries (4 heads), keys and values (2 heads each), 8 rows a head."""
    rows = [Box((16, 0), (16, 5)), Box((32 + 8, 0), (8, 5)), Box((48 + 8, 0), (8, 5))]
    fused = Boxes.side_by_side(rows)
    assert fused.sizes == (32, 5)
    assert fused.run(0, fused.numel) == rows
    assert math.prod(fused.sizes) == fused.numel


@pytest.mark.parametrize(
    "laid",
    [
        (),
        (Laid((0, 0), Box((0, 0), (2, 3))),),
        (Laid((0, 0), Box((0, 0), (3, 3))), Laid((2, 0), Box((4, 0), (2, 3)))),
        (Laid((0, 0), Box((0, 0), (5, 3))),),
        (Laid((0,), Box((0,), (4,))),),
    ],
)
def test_boxes_that_do_not_tile_the_part_are_refused(laid: tuple[Laid, ...]) -> None:
    with pytest.raises(ValueError, match="each element of the part in exactly one of them"):
        Boxes((4, 3), laid)


class Parameter:
    """Anything with a shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape


def test_a_part_of_several_boxes_is_declared() -> None:
    parameter = Parameter(6, 5)
    rows = [Box((4, 0), (4, 5)), Box((10, 0), (2, 5))]
    declare_split(parameter, ["tensor"], shape=(12, 5), boxes=rows)
    split = split_of(parameter)
    assert split.box == Boxes.side_by_side(rows)
    assert split.shape == (12, 5)
    one = Parameter(4, 5)
    declare_split(one, ["tensor"], shape=(12, 5), boxes=rows[:1])
    assert split_of(one).box == rows[0]  # one box is no list


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"boxes": [Box((0, 0), (6, 5))]}, "shape and offsets, or shape and boxes"),
        ({"shape": (6, 5), "offsets": (0, 0), "boxes": [Box((0, 0), (6, 5))]}, "shape and offsets, or shape and boxes"),
        ({"shape": (12, 5), "boxes": [Box((4, 0), (4, 5))]}, r"of shape \(4, 5\), and the parameter has \(6, 5\)"),
        ({"shape": (12, 5), "boxes": [Box((4, 0), (4, 5)), Box((11, 0), (2, 5))]}, "not inside of a tensor"),
    ],
)  # fmt: skip
def test_declarations_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        declare_split(Parameter(6, 5), ["tensor"], **given)
