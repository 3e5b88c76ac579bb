"""Packed weights times x in 8 bits: the same bits everywhere, and as near to the exact product as the header says."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.packed_linear import PackedWeight, pack_weight, packed_linear, unpack, unpack_weight

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
BITS, ROWS = st.sampled_from([8, 4]), st.sampled_from([0, 1, 5, 31, 32, 33, 64, 96, 100, 160])
# (K, G): blocks of 16 and of 32, whole groups of them and groups with a short one at the end, one scale a row.
GROUPS = st.sampled_from([(16, 16), (48, 16), (144, 48), (256, 32), (320, 320), (576, 64), (400, 80)])
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 6, 7, 13, 40])


def weight_of(
    rows: int, columns: int, group: int, bits: int, symmetric: bool, seed: int, shift: float = 0.0
) -> PackedWeight:
    w = values(rows * columns, seed).view(rows, columns) + shift
    return pack_weight(w, bits=bits, group_size=group, symmetric=symmetric)


@examples(times=4)
@given(
    tokens=TOKENS, rows=ROWS, shape=GROUPS, bits=BITS, symmetric=st.booleans(), dtype=st.sampled_from(DTYPES),
    bias=st.sampled_from([None, *DTYPES]), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_and_the_reference_give_the_same_bits(
    tokens: int, rows: int, shape: tuple[int, int], bits: int, symmetric: bool, dtype: torch.dtype,
    bias: torch.dtype | None, strided: bool, seed: int,
) -> None:  # fmt: skip
    columns, group = shape
    weight = weight_of(rows, columns, group, bits, symmetric, seed, shift=0.5)
    x = values(tokens * columns, seed + 1).to(dtype)
    x = x.view(columns, tokens).t() if strided else x.view(tokens, columns)
    b = None if bias is None else values(rows, seed + 2).to(bias)
    with loading.use_mode("reference"):
        expected = packed_linear(x, weight, b, activations="int8")
    for isa in loading.isas():
        with loading.use_isa(isa):
            found = packed_linear(x, weight, b, activations="int8")
            assert same_bits(found, expected), isa
            if tokens:  # of other tokens a row of y knows nothing
                assert same_bits(packed_linear(x[-1], weight, b, activations="int8"), expected[-1]), isa


def test_the_greatest_codes_do_not_overflow() -> None:
    for bits in (8, 4):
        for symmetric in (True, False):
            signs = torch.ones(40, 64)
            signs[::2] = -1.0 if symmetric else 1.0
            signs[:, 0] = 1.0 if symmetric else 0.0
            weight = pack_weight(signs, bits=bits, group_size=64, symmetric=symmetric)
            x = torch.ones(3, 64)
            x[1] = -1.0
            x[2, ::2] = -1.0
            for isa in loading.isas():
                with loading.use_isa(isa):
                    y = packed_linear(x, weight, activations="int8")
                torch.testing.assert_close(y, x @ unpack_weight(weight).t(), rtol=1e-5, atol=1e-4)


@examples(times=2)
@given(
    tokens=TOKENS, rows=ROWS, shape=GROUPS, bits=BITS, symmetric=st.booleans(), dtype=st.sampled_from(DTYPES),
    shift=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_as_near_to_the_exact_product_as_the_header_says(
    tokens: int, rows: int, shape: tuple[int, int], bits: int, symmetric: bool, dtype: torch.dtype, shift: float,
    seed: int,
) -> None:  # fmt: skip
    columns, group = shape
    weight = weight_of(rows, columns, group, bits, symmetric, seed, shift)
    x = values(tokens * columns, seed + 1).view(tokens, columns).to(dtype)
    _, scales, minima = unpack(weight)
    limit = 2**bits - 1 if not symmetric else 2 ** (bits - 1) - 1
    most = scales.double() * limit + (0.0 if minima is None else minima.double().abs())
    size = x.double().abs() @ most.repeat_interleave(group).view(rows, columns).t()
    w = unpack_weight(weight).double()
    exactly = x.double() @ w.t()
    rounded = torch.empty(tokens, columns, dtype=torch.float64)  # D of each column
    for begin in range(0, columns, group):
        for first in range(begin, begin + group, 32):
            cut = slice(first, min(first + 32, begin + group))
            greatest = x[:, cut].double().abs().amax(1, keepdim=True)
            rounded[:, cut] = torch.where(greatest < 2.0**-100, 2.0**-100, greatest / 254 * (1 + 2.0**-14))
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    sums = math.ceil(group / 32) + 2 * columns // group + 4
    bound = rounded @ w.abs().t() + sums * 2.0**-24 * (size * (1 + 2.0**-6)) + 2.0**-100
    bound = bound * (1 + unit) + unit * exactly.abs() + (2.0**-25 if dtype is torch.float16 else 2.0**-133)
    found = packed_linear(x, weight, activations="int8").double()
    assert bool(((found - exactly).abs() <= bound).all())


def test_it_rounds_x_where_exact_activations_do_not() -> None:
    """A number beside one 1,000 times as great has no code of its own."""
    x, weight = torch.full((1, 64), 1.0), pack_weight(torch.ones(32, 64), group_size=32)
    x[0, 0] = 1000.0
    torch.testing.assert_close(packed_linear(x, weight), torch.full((1, 32), 1063.0))
    torch.testing.assert_close(packed_linear(x, weight, activations="int8"), torch.full((1, 32), 1032.0))


@pytest.mark.parametrize("mode", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_tokens_that_are_not_finite_or_nearly_zero(
    mode: str, dtype: torch.dtype, symmetric: bool, use_mode: UseMode
) -> None:
    use_mode(mode)
    weight = weight_of(70, 96, 48, 8, symmetric, 0, shift=1.0)
    x = values(6 * 96, 1).view(6, 96).to(dtype)
    x[0, 3], x[1, 50], x[2, 95] = float("nan"), float("inf"), -float("inf")
    x[3] = 2.0**-101
    x[4] = 0.0
    x[5] = 2.0**-99
    y = packed_linear(x, weight, activations="int8")
    assert bool(y[:3].isnan().all())
    assert not y[3:5].any()
    torch.testing.assert_close(y[5], packed_linear(x[5], weight), rtol=2**-6, atol=0)


@pytest.mark.parametrize("bits", [8, 4])
def test_neither_threads_nor_other_rows_change_a_row(bits: int) -> None:
    columns = 512
    w, x = values(900 * columns, 0).view(900, columns), values(70 * columns, 1).view(70, columns)
    weight = pack_weight(w, bits=bits, group_size=64, symmetric=False)
    found = []
    for threads in THREADS:
        with num_threads(threads):
            found.append(packed_linear(x, weight, activations="int8"))
            assert same_bits(packed_linear(x[3:4], weight, activations="int8"), found[0][3:4])
    assert all(same_bits(y, found[0]) for y in found)
    part = pack_weight(w[32:64], bits=bits, group_size=64, symmetric=False)
    assert same_bits(packed_linear(x, part, activations="int8"), found[0][:, 32:64])


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_gradients_are_those_without_rounding(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    weight, dy = weight_of(40, 48, 16, 8, True, 0), values(2 * 3 * 40, 3).view(2, 3, 40)
    grads = []
    for activations in ("exact", "int8"):
        x = values(2 * 3 * 48, 1).view(2, 3, 48).requires_grad_()
        b = values(40, 2).requires_grad_()
        packed_linear(x, weight, b, activations=activations).backward(dy)  # type: ignore[arg-type]
        grads.append((x.grad, b.grad))
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert other is not None
        assert same_bits(one, other)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_other_activations_are_a_value_error(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    weight, x = weight_of(40, 48, 16, 8, True, 0), torch.ones(3, 48)
    with pytest.raises(ValueError, match="activations='int4'; allowed are 'exact' and 'int8'"):
        packed_linear(x, weight, activations="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^q is"):
        packed_linear(x, weight._replace(q=weight.q[:-1]), activations="int8")


@pytest.mark.dear
def test_opcheck() -> None:
    for tokens in (0, 3, 20):
        for symmetric in (True, False):
            weight = pack_weight(torch.randn(40, 48), bits=4, group_size=16, symmetric=symmetric)
            x, b = torch.randn(tokens, 48, requires_grad=True), torch.randn(40, requires_grad=True)
            args = (x, *weight[:3], b, 40, 4, 16, True)
            torch.library.opcheck(torch.ops.zoo.packed_linear.default, args)
