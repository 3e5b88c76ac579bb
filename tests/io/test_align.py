"""`split_aligned` through the native module: the parts lie end to end and the middle is whole blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.io import native_version, split_aligned

BYTES = st.integers(0, 1 << 40)
ALIGNMENTS = st.integers(0, 16).map(lambda shift: 1 << shift)


@examples(times=5)
@given(BYTES, BYTES, ALIGNMENTS)
def test_parts_lie_end_to_end(offset: int, num_bytes: int, alignment: int) -> None:
    head, middle, tail = split_aligned(offset, num_bytes, alignment)
    assert (head.start, head.stop, middle.stop, tail.stop) == (offset, middle.start, tail.start, offset + num_bytes)
    assert len(head) < alignment
    assert len(tail) < alignment
    assert len(middle) % alignment == 0
    if middle:
        assert middle.start % alignment == 0


def test_an_example_by_hand() -> None:
    assert split_aligned(5, 5000, 512) == (range(5, 512), range(512, 4608), range(4608, 5005))
    assert split_aligned(5, 6, 512).head == range(5, 11)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, 1, 12), "alignment of 12 bytes is not a power of two"),
        ((-1, 1, 512), "offset = -1"),
        ((2**64 - 1, 2, 512), "ends past 64 bits"),
        ((0, 2**64, 512), "num_bytes = 18446744073709551616"),
    ],
)
def test_what_is_refused(arguments: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        split_aligned(*arguments)


def test_version_is_the_crate_s() -> None:
    assert native_version().count(".") == 2
