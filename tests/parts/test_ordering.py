"""The order of engine parts: every declaration holds, and nothing else decides."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.parts import in_order

NAMES = "abcdef"


class Part:
    def __init__(self, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> None:
        self.before, self.after = before, after


@examples(times=5)
@given(st.data())
def test_declarations_hold_and_names_decide_the_rest(data: st.DataObject) -> None:
    names = data.draw(st.permutations(NAMES))
    rank = {name: i for i, name in enumerate(data.draw(st.permutations(NAMES)))}  # some order without a circle
    pairs = [(a, b) for a, b in itertools.permutations(NAMES, 2) if rank[a] < rank[b]]
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=8))
    said = [data.draw(st.booleans()) for _ in chosen]
    parts = {
        name: Part(
            tuple(b for (a, b), first in zip(chosen, said, strict=True) if a == name and first) + ("absent",),  # noqa: RUF005
            tuple(a for (a, b), first in zip(chosen, said, strict=True) if b == name and not first),
        )
        for name in names
    }
    order = [name for name, _ in in_order(parts)]
    assert sorted(order) == sorted(NAMES)
    assert all(order.index(a) < order.index(b) for a, b in chosen)
    assert order == [name for name, _ in in_order(dict(sorted(parts.items())))]
    if not chosen:
        assert order == sorted(NAMES)


def test_a_circle_is_named() -> None:
    parts = {"x": Part(before=("y",)), "y": Part(before=("z",)), "z": Part(before=("x",)), "free": Part()}
    with pytest.raises(ValueError, match="engine parts x, y, z cannot be ordered"):
        in_order(parts)


def test_a_string_is_no_tuple_of_names() -> None:
    part = Part()
    part.before = "y"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Part.before = 'y'; it is a tuple of names of parts: \('y',\)"):
        in_order({"x": part, "y": Part()})
