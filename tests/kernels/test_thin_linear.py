"""Batch-invariant linear layers: the bits of the header everywhere, whoever else is in the batch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, placed, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.thin_linear import linear, thin_linear, thin_linears
from zoo.kernels.thin_linear.reference import thin_linear as of_lists

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
COLUMNS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 48, 64, 100, 333])
ROWS = st.sampled_from([0, 1, 3, 5, 8, 17, 47, 48, 49, 100])
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9, 16, 23])


def reference(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return of_lists(x, [w], [] if bias is None else [bias])


def matrices(tokens: int, rows: int, columns: int, seed: int, dtype: torch.dtype, **how: bool) -> tuple[Tensor, Tensor]:
    x = values(tokens * columns, seed, **how).view(tokens, columns).to(dtype)
    return x, values(rows * columns, seed + 1, **how).view(rows, columns).to(dtype)


@examples(times=4)
@given(
    tokens=TOKENS, rows=ROWS, columns=COLUMNS, dtype=st.sampled_from(DTYPES), bias=st.sampled_from([None, *DTYPES]),
    strided=st.booleans(), special=st.booleans(), offset=st.integers(0, 3), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_has_the_bits_of_the_reference(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, bias: torch.dtype | None, strided: bool, special: bool,
    offset: int, seed: int,
) -> None:  # fmt: skip
    x, w = matrices(tokens, rows, columns, seed, dtype, special=special)
    if strided:
        x = x.t().contiguous().t()
    w = placed(w.reshape(-1), dtype, offset).view(rows, columns)
    b = None if bias is None else values(rows, seed + 2).to(bias)
    expected = reference(x, w, b)
    for isa in loading.isas():
        with loading.use_isa(isa):
            assert same_bits(thin_linear(x, w, b), expected), isa


def test_products_are_added_as_the_header_says() -> None:
    """Lanes, roundings and folding, by numbers of Python: a product of fp32 is exact in fp64, sums of such few are."""
    columns = 53
    x, w = matrices(1, 1, columns, 5, torch.float32)
    lanes = [0.0] * 16
    for k in range(columns):
        exact = math.fsum([float(x[0, k]) * float(w[0, k]), lanes[k % 16]])
        lanes[k % 16] = float(torch.tensor(exact, dtype=torch.float64).float())
    for half in (8, 4, 2, 1):
        for i in range(half):
            lanes[i] = float((torch.tensor(lanes[i]) + torch.tensor(lanes[i + half])).float())
    assert float(thin_linear(x, w)) == lanes[0]


def test_sums_that_would_be_rounded_twice_are_rounded_once() -> None:
    """1 + 2^-24 + 2^-60 is above the middle of two numbers, which fp64 cannot hold: rounding it twice gives 1."""
    for sign in (1.0, -1.0):
        x = torch.zeros(1, 32)
        w = torch.zeros(1, 32)
        x[0, 0], w[0, 0] = sign, 1.0
        small = 2.0**-12 * (1 + 2.0**-18)
        x[0, 16], w[0, 16] = sign * small, small  # 2^-24 · (1 + 2^-17 + 2^-36)
        expected = torch.tensor([[sign * (1 + 2.0**-23)]])
        assert same_bits(reference(x, w, None), expected)
        for isa in loading.isas():
            with loading.use_isa(isa):
                assert same_bits(thin_linear(x, w), expected), isa
        x[0, 16], w[0, 16] = sign * 2.0**-12, 2.0**-12 * (1 + 2.0**-23)
        x[0, 0] = sign * (1 + 2.0**-23)
        found = reference(x, w, None)
        for isa in loading.isas():
            with loading.use_isa(isa):
                assert same_bits(thin_linear(x, w), found), isa


@examples(times=2)
@given(tokens=TOKENS, rows=ROWS, columns=COLUMNS, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_it_is_as_near_to_the_product_as_the_header_says(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    x, w = matrices(tokens, rows, columns, seed, dtype)
    exactly = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().abs().t()
    unit, least = {
        torch.float32: (0.0, 2.0**-149), torch.bfloat16: (2.0**-8, 2.0**-133), torch.float16: (2.0**-11, 2.0**-24),
    }[dtype]  # fmt: skip
    bound = (math.ceil(columns / 16) + 6) * 2.0**-24 * size + 2.0**-149 * columns
    y = thin_linear(x, w).double()
    assert bool(((y - exactly).abs() <= bound + unit * (exactly.abs() + bound) + least).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_its_own_row_changes_a_row(dtype: torch.dtype) -> None:
    x, w = matrices(70, 300, 333, 3, dtype)
    whole = thin_linear(x, w)
    for threads in THREADS:
        with num_threads(threads):
            assert same_bits(thin_linear(x, w), whole)
            for begin, count in ((0, 1), (69, 1), (3, 2), (11, 3), (20, 4), (8, 16), (1, 65)):
                assert same_bits(thin_linear(x[begin : begin + count], w), whole[begin : begin + count])
    assert same_bits(thin_linear(x, w[101:150]), whole[:, 101:150])
    assert same_bits(thin_linear(x.flip(0), w), whole.flip(0))
    assert same_bits(thin_linear(x.view(7, 10, 333), w), whole.view(7, 10, 300))
    assert same_bits(thin_linear(x[0], w), whole[0])


@examples(times=2)
@given(
    tokens=TOKENS, rows=st.lists(ROWS, max_size=3), dtype=st.sampled_from(DTYPES), bias=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_several_weights_give_what_each_gives_alone(
    tokens: int, rows: list[int], dtype: torch.dtype, bias: bool, seed: int
) -> None:
    x = values(tokens * 33, seed).view(tokens, 33).to(dtype)
    weights = [values(n * 33, seed + i).view(n, 33).to(dtype) for i, n in enumerate(rows)]
    biases = [values(n, seed).to(dtype) for n in rows] if bias else []
    alone = [thin_linear(x, w, biases[i] if bias else None) for i, w in enumerate(weights)]
    expected = torch.cat(alone, 1) if alone else x.new_empty(tokens, 0)
    for mode in ("native", "reference"):
        with loading.use_mode(mode):
            assert same_bits(thin_linears(x, weights, biases), expected)


def test_linear_is_thin_for_few_tokens_without_gradients_alone() -> None:
    x, w = matrices(17, 300, 333, 0, torch.float32)
    b = values(300, 9)
    thin, plain = thin_linear(x, w, b), torch.nn.functional.linear
    assert not same_bits(plain(x[:2], w, b), thin[:2])  # or this test would see no difference
    with torch.no_grad():
        assert same_bits(linear(x[:16], w, b), thin[:16])
        assert same_bits(linear(x[5], w, b), thin[5])
        assert same_bits(linear(x, w, b), plain(x, w, b))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x[:2], w, b).dtype is torch.bfloat16
        assert same_bits(linear(x[:2], w.t().contiguous().t()), plain(x[:2], w.t().contiguous().t()))
        assert same_bits(linear(x[:2].double(), w.double()), plain(x[:2].double(), w.double()))
        with pytest.raises(RuntimeError):
            linear(x[:2, :5], w)
    assert same_bits(linear(x[:16], w, b), plain(x[:16], w, b))


@pytest.mark.dear
def test_gradients_are_those_of_the_product() -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 20), (7, 20), (7,)))
    assert torch.autograd.gradcheck(thin_linear, (x, w, b))
    assert torch.autograd.gradcheck(lambda x, b: thin_linear(x, w.detach(), b), (x, b))
    v = torch.randn(4, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w, v: thin_linears(x, [w, v]), (x, w, v))
    assert torch.autograd.gradcheck(lambda x, w, v: thin_linears(x, [w, v], [b, v[:, 0].contiguous()]), (x, w, v))
    for dtype in DTYPES:
        found, plain = [], []
        for fn, to in ((thin_linear, found), (torch.nn.functional.linear, plain)):
            given_ = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
            fn(*given_).backward(torch.ones(2, 3, 7, dtype=dtype))
            to.extend(t.grad for t in given_)
        for mine, theirs in zip(found, plain, strict=True):
            assert mine.dtype is dtype
            torch.testing.assert_close(mine, theirs, rtol=3 * torch.finfo(dtype).eps, atol=1e-2 * (dtype.itemsize == 2))


def test_tangents_are_not_lost() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    with torch.no_grad():
        found = torch.func.jvp(lambda x: linear(x, w), (x,), (x,))
    torch.testing.assert_close(found[0], found[1])
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: thin_linear(x, w.requires_grad_()), (x,), (x,))


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, w = torch.ones(3, 48), torch.ones(40, 48)
    with pytest.raises(ValueError, match=r"^weights\[0\] has shape .*40, 48.*; it must be .*40, 32"):
        thin_linear(torch.ones(3, 32), w)
    with pytest.raises(ValueError, match=r"^weights\[0\] has shape .*48.*; it must have 2 dims"):
        thin_linear(x, w[0])
    with pytest.raises(ValueError, match=r"^x is"):
        thin_linear(x.int(), w)
    with pytest.raises(ValueError, match=r"^weights\[0\] is torch\.bfloat16; it must be torch\.float32"):
        thin_linear(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"^weights\[0\] of shape .* must be contiguous"):
        thin_linear(x, torch.ones(48, 40).t())
    with pytest.raises(ValueError, match=r"^biases\[0\] has shape"):
        thin_linear(x, w, torch.ones(39))
    with pytest.raises(ValueError, match="there are 2 weights and 1 biases; give one for each, or none"):
        thin_linears(x, [w, w], [torch.ones(40)])


def test_opcheck() -> None:
    for tokens in (0, 3, 20):
        x, w, v, b = (torch.randn(*shape) for shape in ((tokens, 48), (40, 48), (7, 48), (40,)))
        torch.library.opcheck(torch.ops.zoo.thin_linear.default, (x, [w], [b]))
        torch.library.opcheck(torch.ops.zoo.thin_linear.default, (x, [w, v], []))
