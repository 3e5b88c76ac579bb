"""Norm and scaling: values bit for bit, sums within their bound, and the overflow check."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.norm import grad_norm, reference, scale_sum_squares_, sum_squares

from .cases import DTYPES, SIZES, placed, same_bits, values

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


@examples(times=3)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES), offset=st.integers(0, 3),
    seed=st.integers(0, 1000), special=st.booleans(), factor=st.sampled_from([1.0, -1.0, 0.3, 2.0**-16, 1e30]),
)  # fmt: skip
def test_it_equals_the_reference(
    sizes: list[int], dtype: torch.dtype, offset: int, seed: int, special: bool, factor: float
) -> None:
    """Scaled values bit for bit. Both sums are of the same n exact squares, each within n·2^-53 of the true sum."""
    start = [placed(values(n, seed + i, special=special), dtype, offset) for i, n in enumerate(sizes)]
    expected = [placed(t, dtype, offset) for t in start]
    sums = reference.scale_sum_squares_(expected, factor)
    first = None
    for isa in loading.isas():
        got = [placed(t, dtype, offset) for t in start]
        with loading.use_isa(isa):
            found = scale_sum_squares_(got, factor)
            again = sum_squares(got)
        assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True)), isa
        assert same_bits(found, again)
        first = found if first is None else first
        assert same_bits(found, first)
        finite = torch.tensor([bool(t.isfinite().all()) for t in expected])
        assert torch.equal(found.isfinite(), finite)
        bound = sums * torch.tensor([2.0 * n * 2**-53 for n in sizes], dtype=torch.float64)
        assert bool(((found - sums).abs() <= bound)[finite].all())


def test_threads_change_nothing() -> None:
    tensors = [values(2**20 + 5, 0), values(3, 1), values(200_000, 2)]
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(sum_squares(tensors))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_norm_is_over_all_tensors_and_shows_overflow() -> None:
    assert grad_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0
    assert grad_norm([]) == 0.0
    assert grad_norm([torch.tensor([3.4e38] * 4)]) == pytest.approx(6.8e38)
    assert math.isnan(grad_norm([torch.tensor([1.0, math.nan])]))
    assert grad_norm([torch.tensor([1.0, -math.inf], dtype=torch.float16)]) == math.inf
    assert grad_norm([torch.ones(4, dtype=torch.float64)]) == 2.0


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    for wrong in (
        [torch.ones(3, dtype=torch.int32)],
        [torch.ones(3), torch.ones(3).half()],
        [torch.ones(3, 2).t()],
        [torch.ones(3), torch.ones(3, device="meta")],
    ):
        with pytest.raises(ValueError, match=r"tensors\[[01]\]"):
            sum_squares(wrong)


def test_opcheck() -> None:
    tensors = [torch.rand(3), torch.rand(2, 2)]
    torch.library.opcheck(torch.ops.zoo.sum_squares.default, (tensors,))
    torch.library.opcheck(torch.ops.zoo.scale_sum_squares_.default, (tensors, 0.5))
