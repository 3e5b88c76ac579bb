"""Numbers by place: the words of Philox, in (0, 1), wherever they are asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.philox import words
from zoo.kernels.uniform import reference, uniform

needs_kernels = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
BITS = st.integers(-(2**63), 2**63 - 1)


@needs_kernels
@examples(times=3)
@given(places=st.lists(BITS, max_size=4), seed=BITS, count=st.integers(0, 300))
def test_every_instruction_set_has_the_bits_of_the_reference(places: list[int], seed: int, count: int) -> None:
    given = torch.tensor(places, dtype=torch.int64)
    right = reference.uniform(given, seed, count)
    for isa in loading.isas():
        with loading.use_isa(isa):
            assert torch.equal(uniform(given, seed, count), right)
    assert right.shape == (len(places), count)
    assert bool(((right > 0) & (right < 1)).all())


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_a_number_is_a_word_of_its_place(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    found = uniform(torch.tensor([-1, 2**40 + 5]), 2**62 + 9, 10)
    for row, place in zip(found, (2**64 - 1, 2**40 + 5), strict=True):
        assert torch.equal(row, (words(2**62 + 9, place, 10).double() + 0.5) / 2**32)
    torch.set_num_threads(2)
    try:  # of rows that are split over threads
        many = uniform(torch.arange(3), 5, 70_000)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(many[2], uniform(torch.tensor([2]), 5, 70_000)[0])


@needs_kernels
def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.zoo.uniform.default, (torch.tensor([3, 4]), 7, 9))


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_what_cannot_be(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    with pytest.raises(ValueError, match="it must have 1 dims"):
        uniform(torch.zeros(2, 2, dtype=torch.int64), 0, 3)
    with pytest.raises(ValueError, match=r"places.*int64|int64"):
        uniform(torch.zeros(2), 0, 3)
    with pytest.raises(ValueError, match="count is -1"):
        uniform(torch.zeros(2, dtype=torch.int64), 0, -1)
