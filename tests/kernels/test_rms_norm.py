"""Root mean square normalisation: the bits of the reference, the formula, the gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, placed, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.rms_norm import add_rms_norm, reference, rms_norm

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor


@examples(times=3)
@given(
    rows=st.sampled_from([0, 1, 2, 5, 17]), dim=st.sampled_from([1, 3, 15, 16, 63, 64, 65, 100, 576, 1025]),
    dtype=st.sampled_from(DTYPES), weight=st.sampled_from(DTYPES), plus_one=st.booleans(), special=st.booleans(),
    offset=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_has_the_bits_of_the_reference(
    rows: int, dim: int, dtype: torch.dtype, weight: torch.dtype, plus_one: bool, special: bool, offset: int, seed: int
) -> None:
    x, r = (placed(values(rows * dim, seed + k, special=special), dtype, offset).view(rows, dim) for k in range(2))
    w = values(dim, seed + 2).to(weight)
    expected = reference.rms_norm(x, w, 1e-5, plus_one), *reference.add_rms_norm(x, r, w, 1e-5, plus_one)
    for isa in loading.isas():
        with loading.use_isa(isa):
            found = rms_norm(x, w, eps=1e-5, plus_one=plus_one), *add_rms_norm(x, r, w, eps=1e-5, plus_one=plus_one)
            assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True)), isa


def test_it_is_the_formula() -> None:
    x, w = torch.randn(3, 4, 50, dtype=torch.float64), torch.randn(50, dtype=torch.float64)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
    torch.testing.assert_close(rms_norm(x, w), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rms_norm(x, w - 1, plus_one=True), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rms_norm(x.float(), w.float()), expected.float(), rtol=2e-6, atol=2e-6)
    y, total = add_rms_norm(x, x, w / 2)
    torch.testing.assert_close(total, 2 * x)
    torch.testing.assert_close(y, rms_norm(2 * x, w) / 2)


def test_neither_threads_nor_other_rows_change_a_row() -> None:
    x, w = values(900 * 333, 0).view(900, 333), values(333, 1)
    whole = rms_norm(x, w)
    for threads in THREADS:
        with num_threads(threads):
            assert same_bits(rms_norm(x, w), whole)
            assert same_bits(rms_norm(x[7:9], w), whole[7:9])


def test_gradients() -> None:
    x, r, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 9), (2, 3, 9), (9,)))
    for plus_one in (False, True):
        assert torch.autograd.gradcheck(lambda x, w, p=plus_one: rms_norm(x, w, plus_one=p), (x, w))
        assert torch.autograd.gradcheck(lambda x, r, w, p=plus_one: add_rms_norm(x, r, w, plus_one=p), (x, r, w))
    low = [t.detach().float().requires_grad_() for t in (x, r, w)]
    torch.autograd.backward(add_rms_norm(*low), [torch.ones(2, 3, 9), torch.full((2, 3, 9), 0.5)])
    torch.autograd.backward(add_rms_norm(x, r, w), [torch.ones(2, 3, 9).double(), torch.full((2, 3, 9), 0.5).double()])
    for mine, exact in zip(low, (x, r, w), strict=True):
        assert mine.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(mine.grad, exact.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, w = torch.ones(3, 48), torch.ones(48)
    with pytest.raises(ValueError, match=r"^weight has shape"):
        rms_norm(x, torch.ones(47))
    with pytest.raises(ValueError, match=r"^x is"):
        rms_norm(x.int(), w)
    with pytest.raises(ValueError, match=r"^x of shape .* must be contiguous"):
        rms_norm(torch.ones(48, 3).t(), w)
    with pytest.raises(ValueError, match=r"^residual has shape"):
        add_rms_norm(x, x[:2], w)
    with pytest.raises(ValueError, match=r"eps is -1(.0)?; it must not be negative"):
        rms_norm(x, w, eps=-1.0)
    with pytest.raises(ValueError, match=r"its last dim must be at least 1"):
        rms_norm(torch.ones(3, 0), torch.ones(0))


@pytest.mark.dear
def test_opcheck() -> None:
    x, r, w = torch.randn(2, 3, 20), torch.randn(2, 3, 20), torch.randn(20)
    for grad in (False, True):
        given_ = [t.clone().requires_grad_(grad) for t in (x, r, w)]
        torch.library.opcheck(torch.ops.zoo.rms_norm.default, (given_[0], given_[2], 1e-6, False))
        torch.library.opcheck(torch.ops.zoo.add_rms_norm.default, (*given_, 1e-6, True))
