"""Bits and shares as functions of the step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.compression.schedule import bits_at, share_at, steps_at_bits


@given(
    offset=st.integers(0, 20), start=st.integers(1, 16), falls=st.integers(0, 8), period=st.integers(1, 9),
    steps=st.integers(0, 300),
)  # fmt: skip
def test_bits_fall_by_one_when_a_period_that_doubles_is_over(
    offset: int, start: int, falls: int, period: int, steps: int
) -> None:
    target = max(1, start - falls)
    bits, after, since = start, period, 0
    for step in range(steps + 1):
        at = step - offset
        if bits > target and at >= after:
            bits, after, since = bits - 1, after * 2, at
        args = {"offset": offset, "start_bits": start, "target_bits": target, "period": period}
        assert bits_at(step, **args) == bits
        assert steps_at_bits(step, **args) == max(0, at) - since


def test_without_a_fall_the_period_may_be_anything() -> None:
    assert bits_at(5, offset=0, start_bits=8, target_bits=8, period=0) == 8
    with pytest.raises(ValueError, match="quantization_period = 0"):
        bits_at(5, offset=0, start_bits=8, target_bits=4, period=0)


@given(st.integers(0, 5000), st.floats(0.0001, 1.0))
def test_the_quantised_share_grows_to_one(steps: int, ratio: float) -> None:
    assert share_at(0, ratio) == ratio
    assert share_at(steps, ratio) <= share_at(steps + 1, ratio) <= 1.0
