"""Bias and GELU, and exp under it: kernels equal the reference bit for bit; the reference is accurate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import elementary, loading
from zoo.kernels.bias_gelu import bias_gelu, bias_gelu_backward, reference

from .cases import DTYPES, SIZES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
FORMS = st.sampled_from(["none", "tanh"])


@examples(times=3)
@given(
    rows=st.sampled_from([(), (0,), (1,), (3,), (2, 5), (65,), (130,)]), dim=SIZES, dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from(DTYPES), form=FORMS, offset=st.integers(0, 3), seed=st.integers(0, 1000),
    special=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rows: tuple[int, ...], dim: int, dtype: torch.dtype, bias_dtype: torch.dtype, form: str, offset: int, seed: int,
    special: bool,
) -> None:  # fmt: skip
    x = tensor((*rows, dim), dtype, seed, offset=offset, special=special)
    dy = tensor((*rows, dim), dtype, seed + 1, offset=offset, special=special)
    b = tensor((dim,), bias_dtype, seed + 2, offset=offset, special=special)
    assert_all_same(lambda: [bias_gelu(x, b, approximate=form)], [reference.bias_gelu(x, b, form == "tanh")])
    grads = reference.bias_gelu_backward(dy, x, b, form == "tanh")
    assert_all_same(lambda: bias_gelu_backward(dy, x, b, approximate=form), grads)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_large_shapes_and_threads_change_nothing(form: str) -> None:
    x, dy, b = (
        tensor((1031, 1021), torch.float32, 0, offset=1),
        tensor((1031, 1021), torch.float32, 1),
        torch.rand(1021),
    )
    expected = (reference.bias_gelu(x, b, form == "tanh"), *reference.bias_gelu_backward(dy, x, b, form == "tanh"))
    for threads in THREADS:
        with num_threads(threads):
            got = (bias_gelu(x, b, approximate=form), *bias_gelu_backward(dy, x, b, approximate=form))
        assert all(map(same_bits, got, expected)), threads


def test_exp_is_within_two_units_of_the_last_place() -> None:
    """Every 997th fp32 number between -103.9 and 88.7, and the limits; the bound is derived in elementary.h."""
    bits = torch.arange(0, 0x42D00000, 997, dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), -bits.view(torch.float32)])
    x = x[(x > -103.9) & (x < 88.7)]
    exact, found = x.double().exp(), elementary.exp(x).double()
    unit = torch.exp2(exact.log2().floor().clamp(min=-126) - 23)
    assert float(((found - exact).abs() / unit).max()) <= 2
    special = torch.tensor([float("-inf"), -104.1, 89.0, float("inf"), float("nan"), 0.0, -0.0])
    found = elementary.exp(special)
    assert found[:4].tolist() == [0.0, 0.0, float("inf"), float("inf")]
    assert bool(found[4].isnan())
    assert found[5:].tolist() == [1.0, 1.0]


def test_the_tail_of_the_normal_distribution_is_as_accurate_as_derived() -> None:
    a = torch.linspace(0, 12.9, 300001)
    exact = 0.5 * torch.erfc(a.double() / 2**0.5)
    bound = (a.double() ** 2 / 2 + 12) * 2.0**-24 * exact + 2.0**-149
    assert bool(((elementary.normal_tail(a)[0].double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_it_is_the_gelu_of_torch(form: str) -> None:
    """In fp64 to 1e-13; in fp32 within 16 units of 2^-24 of |z|, also where torch's own cancels."""
    z = torch.linspace(-13, 13, 20001, dtype=torch.float64)
    exact = torch.nn.functional.gelu(z, approximate=form)
    none = torch.zeros(20001, dtype=torch.float64)
    torch.testing.assert_close(bias_gelu(z, none, approximate=form), exact, rtol=1e-12, atol=1e-13)
    x = z.float()
    exact = torch.nn.functional.gelu(x.double(), approximate=form)
    error = (bias_gelu(x, none.float(), approximate=form).double() - exact).abs()
    assert bool((error <= 16 * 2.0**-24 * x.double().abs()).all())


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gradients(form: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, b = (torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in ((5, 7), (7,)))
    assert torch.autograd.gradcheck(lambda x, b: bias_gelu(x, b, approximate=form), (x, b))
    exact = torch.autograd.grad((bias_gelu(x, b, approximate=form) ** 2).sum(), (x, b))
    x32, b32 = (t.detach().float().requires_grad_() for t in (x, b))
    found = torch.autograd.grad((bias_gelu(x32, b32, approximate=form) ** 2).sum(), (x32, b32))
    for a, c in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors_with_the_numbers(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, b = torch.ones(3, 4), torch.ones(4)
    for args, message in (
        ((x.int(), b), "x is .*Int|x is torch.int32"),
        ((torch.ones(4, 3).t(), b), "x of shape .*3, 4.*strides .*1, 3"),
        ((torch.tensor(1.0), b), "x has"),
        ((x, torch.ones(5)), "bias has shape .*5.*must be .*4"),
        ((x, torch.ones(4, device="meta")), "bias is on meta"),
        ((x, b.double()), "bias is torch.float64; allowed are torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            bias_gelu(*args)
    with pytest.raises(ValueError, match="approximate is 'erf'"):
        bias_gelu(x, b, approximate="erf")
    with pytest.raises(ValueError, match=r"grad_y has shape .*2, 4"):
        bias_gelu_backward(x[:2], x, b)


def test_opcheck() -> None:
    x, b = torch.rand(3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    for tanh in (False, True):
        torch.library.opcheck(torch.ops.zoo.bias_gelu.default, (x, b, tanh))
    d = x.detach()
    torch.library.opcheck(torch.ops.zoo.bias_gelu_backward.default, (d, d, b.detach(), True))
