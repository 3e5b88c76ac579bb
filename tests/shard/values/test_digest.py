"""The digest of what was written: equal for equal bytes, and on a GPU without waiting for it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.shard.values.writes import digest_of


def test_a_tensor_of_another_device_is_digested_there() -> None:
    # No value of a meta tensor can be read: whatever asks for one fails here.
    for dtype in (torch.float32, torch.bfloat16):
        found = digest_of(torch.empty(3, 5, device="meta", dtype=dtype))
        assert (found.device.type, found.dtype, found.shape) == ("meta", torch.int64, ())


@examples(times=5)
@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=20), place=st.integers(0, 19), change=st.integers(1, 255)
)
def test_one_other_byte_is_another_digest(values: list[int], place: int, change: int) -> None:
    other = list(values)
    other[place % len(values)] = (other[place % len(values)] + change) % 256
    mine, theirs = (int(digest_of(torch.tensor(of, dtype=torch.uint8))) for of in (values, other))
    assert mine != theirs
    assert mine == int(digest_of(torch.tensor(values, dtype=torch.uint8)))
    assert 0 <= mine < 2**48
