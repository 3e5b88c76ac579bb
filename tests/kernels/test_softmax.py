"""Softmax of attention: every instruction set equals the reference bit for bit; the reference equals torch in fp64."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.softmax import reference, softmax, softmax_backward

from .cases import DTYPES, SIZES, same_bits
from .oracles import THREADS, assert_all_same, num_threads, tensor

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
MASKS = st.sampled_from(["none", "keys", "queries", "full", "heads", "sliced"])


def mask_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor | None:
    queries, keys = shape[-2:]
    full = {
        "none": None, "keys": (keys,), "queries": (queries, 1), "full": shape, "heads": (1, queries, keys),
        "sliced": (queries, 2 * keys),
    }[kind]  # fmt: skip
    if full is None:
        return None
    mask = tensor(full, dtype, seed)
    mask = mask.masked_fill(tensor(full, torch.float32, seed + 1) > 0.3, -torch.inf)
    return mask[:, ::2] if kind == "sliced" else mask


@examples(times=3)
@given(
    rows=st.sampled_from([(1, 1), (2, 3), (0, 2), (3, 0), (1, 17)]), keys=SIZES, dtype=st.sampled_from(DTYPES),
    mask_dtype=st.sampled_from(DTYPES), kind=MASKS, causal=st.booleans(), scale=st.sampled_from([1.0, 0.125, 3.7]),
    offset=st.integers(0, 3), seed=st.integers(0, 1000), special=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    rows: tuple[int, int], keys: int, dtype: torch.dtype, mask_dtype: torch.dtype, kind: str, causal: bool,
    scale: float, offset: int, seed: int, special: bool,
) -> None:  # fmt: skip
    shape = (*rows, keys)
    x = tensor(shape, dtype, seed, offset=offset, special=special)
    mask = mask_of(kind, shape, mask_dtype, seed + 1)
    y = reference.softmax(x, mask, scale, causal)
    assert_all_same(lambda: [softmax(x, scale=scale, mask=mask, causal=causal)], [y])
    dy = tensor(shape, dtype, seed + 3, offset=offset, special=special)
    grad = reference.softmax_backward(dy, y, scale)
    assert_all_same(lambda: [softmax_backward(dy, y, scale=scale)], [grad])


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(1031, 1021), (3, 2**18 + 1), (1, 2**20 + 7)])
def test_large_shapes_and_threads_change_nothing(shape: tuple[int, int]) -> None:
    x, dy = tensor(shape, torch.float32, 0, offset=1), tensor(shape, torch.float32, 1)
    expected = reference.softmax(x, None, 0.5, True)
    grad = reference.softmax_backward(dy, expected, 0.5)
    for threads in THREADS:
        with num_threads(threads):
            y = softmax(x, scale=0.5, causal=True)
            dx = softmax_backward(dy, y, scale=0.5)
        assert same_bits(y, expected), threads
        assert same_bits(dx, grad), threads


@examples(times=3)
@given(
    queries=st.integers(1, 9), keys=st.integers(1, 400), seed=st.integers(0, 1000), causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_it_is_softmax_as_accurately_as_derived(
    queries: int, keys: int, seed: int, causal: bool, dtype: torch.dtype
) -> None:
    """Relatively (4·(|v| + max|v|) + 2·c + 12)·u + 2^-126 absolutely: u = 2^-24, c = ⌈K/64⌉ + 6 additions.

    v errs by 2u of its terms, v - M by that of both and u·|v - M| more, which exp makes relative errors; exp adds 4u;
    S errs by the largest of these and c·u; the inverse, the product and the rounding add 3u. bf16 and fp16 round the
    result once more, by half a unit in the last place or of the grid of subnormal numbers.
    """
    x, mask = tensor((queries, keys), dtype, seed), tensor((keys,), torch.float32, seed + 1)
    found = softmax(x, scale=0.7, mask=mask, causal=causal).double()
    scaled = x.double() * torch.tensor(0.7).double()
    v = scaled + mask.double()
    size = scaled.abs() + mask.double().abs()
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    v = v.masked_fill(hidden, -torch.inf) if causal else v
    exact = v.softmax(-1).nan_to_num(0.0)
    most = size.amax(-1, keepdim=True)
    bound = exact * (4 * (size + most) + 4 * most + 2 * (-(-keys // 64) + 6) + 12) * 2.0**-24 + 2.0**-126
    if dtype is not torch.float32:
        info = torch.finfo(dtype)
        bound = bound + (exact + bound) * info.eps / 2 + info.tiny * info.eps / 2
    assert bool(((found - exact).abs() <= bound).all())
    if not causal and dtype is torch.float32:
        assert float((found.sum(-1) - 1).abs().max()) <= (keys + 20) * 2.0**-24


@examples(times=3)
@given(rows=st.integers(1, 9), keys=st.integers(1, 400), seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 0.125]))
def test_the_gradient_is_as_near_to_the_exact_one_as_derived(rows: int, keys: int, seed: int, scale: float) -> None:
    """|c|·y·((c + 2)·Σ|dy·y| + 4·(|dy| + Σ|dy·y|))·u, from the y that is given: c additions as above, u = 2^-24.

    The lane sum errs by (c + 1)·u·Σ|dy·y|, products included; the difference and the two products that follow by 3u.
    """
    y = torch.softmax(tensor((rows, keys), torch.float32, seed), -1)
    dy = tensor((rows, keys), torch.float32, seed + 1)
    found = softmax_backward(dy, y, scale=scale).double()
    terms = dy.double() * y.double()
    exact = scale * y.double() * (dy.double() - terms.sum(-1, keepdim=True))
    size, count = terms.abs().sum(-1, keepdim=True), -(-keys // 64) + 6
    bound = scale * y.double() * ((count + 2) * size + 4 * (dy.double().abs() + size)) * 2.0**-24 + 2.0**-126
    assert bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["x", "mask"])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_a_row_that_sees_a_nan_or_infinity_is_nan_as_in_torch(
    bad: float, where: str, mode: str, use_mode: UseMode
) -> None:
    """All of it, hidden keys too; and what a row does not see does nothing to it."""
    use_mode(mode)
    x, mask = torch.zeros(2, 5, 5), torch.zeros(2, 5, 5)
    (x if where == "x" else mask)[0, :, 2] = bad
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for isa in loading.isas() or ("portable",):
        with loading.use_isa(isa) if mode == "native" else contextlib.nullcontext():
            y = softmax(x, mask=mask, causal=True)
        torch.testing.assert_close(y, torch.softmax((x + mask).masked_fill(hidden, -torch.inf), -1), equal_nan=True)
        assert y.isnan().all(-1).tolist() == [[False, False, True, True, True], [False] * 5]
        assert not y[0, :2].isnan().any()


def test_rows_without_a_key_are_zero_and_nan_stays_in_its_row() -> None:
    x = torch.zeros(4, 3)
    x[1, 2] = torch.nan
    x[2, 0] = torch.inf
    mask = torch.zeros(4, 3)
    mask[0] = -torch.inf
    y = softmax(x, mask=mask)
    assert y[0].tolist() == [0, 0, 0]
    assert bool(y[1:3].isnan().all())
    torch.testing.assert_close(y[3], torch.full((3,), 1 / 3))
    assert softmax(torch.zeros(3, 2), causal=True).tolist() == [[0, 0], [1, 0], [0.5, 0.5]]
    assert softmax(torch.zeros(1, 2), causal=True).tolist() == [[0.5, 0.5]]


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    for shape in ((4,), (3, 1), (2, 1, 4), (2, 3, 4)):
        m = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, m: softmax(x, scale=0.5, mask=m, causal=True), (x, m))
        x32, m32 = (t.detach().float().requires_grad_() for t in (x, m))
        exact = torch.autograd.grad((softmax(x, scale=0.5, mask=m) ** 2).sum(), (x, m))
        found = torch.autograd.grad((softmax(x32, scale=0.5, mask=m32) ** 2).sum(), (x32, m32))
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad((torch.softmax(0.5 * x, -1) ** 2).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad((softmax(x, scale=0.5) ** 2).sum(), x)[0], theirs)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors_with_the_numbers(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x = torch.ones(3, 4)
    for bad, mask, message in (
        (x.int(), None, "x is .*Int|x is torch.int32"),
        (torch.ones(4, 3).t(), None, "x of shape .*3, 4.*strides .*1, 3"),
        (torch.ones(4), None, "x has shape .*4.*2 to 8 dims"),
        (torch.ones([1] * 9), None, "x has shape .*2 to 8 dims"),
        (x, torch.ones(5), r"mask has shape \(5,\), which does not broadcast to \(3, 4\)"),
        (x, torch.ones(4, dtype=torch.bool), "mask is .*[bB]ool"),
        (x, torch.ones(4, device="meta"), "mask is on meta"),
        (x, torch.ones(4).double(), "mask is torch.float64; allowed are torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            softmax(bad, mask=mask)
    with pytest.raises(ValueError, match=r"grad_y has shape .*2, 4"):
        softmax_backward(x[:2], x)
    with pytest.raises(ValueError, match=r"y has shape .*2 to 8"):
        softmax_backward(x[0], x[0])


def test_opcheck() -> None:
    x, m = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.zoo.softmax.default, (x, m, 0.5, True))
    torch.library.opcheck(torch.ops.zoo.softmax.default, (x, None, 0.5, False))
    torch.library.opcheck(torch.ops.zoo.softmax_backward.default, (x.detach(), x.detach(), 0.5))
