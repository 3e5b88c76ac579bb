"""Quantisers against NumPy, and what they promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from zoo.compression.quantisers import (
    asymmetric,
    binary,
    check_finite,
    fits,
    grouped,
    mixed,
    nearest,
    noise,
    straight_through,
    symmetric,
    ternary,
    within,
)

F = np.float32
NUMBERS = st.one_of(
    st.floats(-8, 8, width=32), st.integers(-8, 8).map(lambda i: i / 2), st.sampled_from([0.0, -0.0, 1.0, 3.5])
).map(F)
GROUPS = hnp.arrays(F, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9), elements=NUMBERS)
TIES = np.array([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=F)  # 4 bits: Q = 7, so the scale is 1
EQUAL = np.full((2, 5), F(3.25))
ZEROS = np.zeros((2, 3), dtype=F)


def numpy_symmetric(w: Any, bits: int, u: Any = None) -> Any:
    limit = F(2 ** (bits - 1) - 1)
    out = np.zeros_like(w)
    for row, (x, dice) in enumerate(zip(w, w if u is None else u, strict=True)):
        span = np.abs(x).max()
        if span == 0:
            continue
        with np.errstate(over="ignore"):
            scaled = x * (limit / span)
        q = np.rint(scaled) if u is None else np.floor(scaled + dice)
        out[row] = np.clip(q, -limit, limit) * (span / limit)
    return out


def numpy_asymmetric(w: Any, bits: int, u: Any = None) -> Any:
    limit = F(2**bits - 1)
    out = np.empty_like(w)
    for row, (x, dice) in enumerate(zip(w, w if u is None else u, strict=True)):
        lo = x.min()
        span = x.max() - lo
        if span == 0:
            out[row] = lo
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (x - lo) * (limit / span)
        scaled = np.where(np.isnan(scaled), F(0), scaled)
        q = np.rint(scaled) if u is None else np.floor(scaled + dice)
        out[row] = np.clip(q, 0, limit) * (span / limit) + lo
    return out


def mean_of_others(x: Any) -> Any:
    """The mean of |x| over what is not zero."""
    return np.abs(x[x != 0]).mean() if (x != 0).any() else 0.0


def numpy_ternary(w: Any) -> Any:
    out = np.zeros(w.shape)
    for row, x in enumerate(w.astype(np.float64)):
        large = np.abs(x) > 0.7 * mean_of_others(x)
        if large.any():
            out[row] = np.where(large, np.sign(x) * np.abs(x[large]).mean(), 0.0)
    return out


def numpy_binary(w: Any) -> Any:
    wide = w.astype(np.float64)
    return np.stack([np.sign(x) * mean_of_others(x) for x in wide]) if len(wide) else wide


@given(w=GROUPS, bits=st.integers(2, 16), dice=st.none() | st.integers(0, 2**31))
@example(w=TIES, bits=4, dice=None)
@example(w=EQUAL, bits=3, dice=None)
@example(w=ZEROS, bits=8, dice=1)
def test_uniform_quantisers_are_numpys_bit_for_bit(w: Any, bits: int, dice: int | None) -> None:
    u = None if dice is None else torch.rand(w.shape, generator=torch.Generator().manual_seed(dice))
    drawn = None if u is None else u.numpy()
    for ours, theirs in ((symmetric, numpy_symmetric), (asymmetric, numpy_asymmetric)):
        found, _ = ours(torch.from_numpy(w), bits, u)
        np.testing.assert_array_equal(found.numpy(), theirs(w, bits, drawn))


def test_ties_go_to_the_even_one() -> None:
    found, _ = symmetric(torch.from_numpy(TIES), 4)
    assert found.tolist() == [[7.0, 0.0, 2.0, 2.0, -0.0, -2.0, -2.0]]


@given(w=GROUPS, bits=st.integers(2, 16))
@example(w=np.array([[0, 1.1754944e-38]], dtype=F), bits=12)
@example(w=np.array([[0, 2e-39, 6e-39, 1.1754944e-38]], dtype=F), bits=8)
def test_the_error_is_at_most_half_a_step_and_the_values_are_few(w: Any, bits: int) -> None:
    for quantise, steps, ends in ((symmetric, 2 ** (bits - 1) - 1, 2), (asymmetric, 2**bits - 1, 1)):
        v, span = quantise(torch.from_numpy(w), bits)
        step = span.numpy().astype(np.float64) / steps
        error = np.abs(v.numpy().astype(np.float64) - w)
        # Half a step, and what fp32 rounds away: an index up to 2^16 times its relative error, twice, and the sum. A
        # scale has an absolute error too, half of the smallest subnormal number, which an index multiplies.
        slack = 2.0**-22 * np.abs(w).max(1, keepdims=True) * 2 + 1e-44 + 2.0**-150 * steps
        with np.errstate(over="ignore", divide="ignore"):
            stepped = np.isfinite(F(steps) / span.numpy())  # below that a span has its two ends alone
        assert (error <= np.where(stepped, step / 2, step * steps) + slack).all()
        assert all(len(np.unique(row)) <= steps * ends + 1 for row in v.numpy())


@given(w=GROUPS)
@example(w=EQUAL)
@example(w=ZEROS)
def test_ternary_and_binary_are_numpys(w: Any) -> None:
    found, _ = ternary(torch.from_numpy(w))
    spread = np.abs(w.astype(np.float64))
    margin = np.abs(spread - 0.7 * np.array([[mean_of_others(row)] for row in spread]).reshape(-1, 1))
    clear = (margin > 1e-5 * (spread.max(initial=0) + 1e-30)) | (spread == 0)
    if clear.all():  # elsewhere fp32 and fp64 may differ about which side of the threshold an element is on
        np.testing.assert_allclose(found.numpy(), numpy_ternary(w), rtol=2e-6, atol=1e-37)
    np.testing.assert_allclose(binary(torch.from_numpy(w))[0].numpy(), numpy_binary(w), rtol=2e-6, atol=1e-37)
    for row in found.numpy():
        assert len(np.unique(np.abs(row))) <= 2


@given(w=GROUPS, bits=st.integers(2, 8))
def test_what_is_quantised_stays_when_it_is_quantised_again(w: Any, bits: int) -> None:
    once, _ = symmetric(torch.from_numpy(w), bits)
    twice, _ = symmetric(once, bits)
    torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_stochastic_rounding_is_right_on_average() -> None:
    w = torch.tensor([[1.0, 0.3, -0.2, 0.77]]).repeat(4000, 1)
    v, _ = symmetric(w, 3, noise(w, seed=1, step=2, name="w"))
    torch.testing.assert_close(v.mean(0), w[0], rtol=0, atol=0.01)  # 4 deviations of (1/3)·0.5/sqrt(4000)
    assert torch.equal(v[:, 0], w[:, 0]), "the largest is on the grid"


def test_noise_is_a_function_of_seed_step_and_name() -> None:
    like = torch.empty(4, 5)
    first = noise(like, seed=1, step=2, name="w")
    assert torch.equal(first, noise(like, seed=1, step=2, name="w"))
    assert ((first >= 0) & (first < 1)).all()
    for other in ({"seed": 2}, {"step": 3}, {"name": "v"}):
        assert not torch.equal(first, noise(like, **{"seed": 1, "step": 2, "name": "w", **other}))  # type: ignore[arg-type]


def test_what_lies_outside_of_given_ends_becomes_the_nearer_one() -> None:
    w, lo, hi = torch.tensor([[-9.0, -1.0, 0.4, 2.0, 9.0]]), torch.tensor(-1.0), torch.tensor(2.0)
    assert within(w, lo, hi, 2)[0].tolist() == [[-1.0, -1.0, 0.0, 2.0, 2.0]]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("quantise", [symmetric, asymmetric, lambda w, _: ternary(w), lambda w, _: binary(w)])
def test_what_is_not_finite_is_refused_by_name(quantise: Any, bad: float) -> None:
    w = torch.randn(3, 4)
    _, span = quantise(w, 4)
    check_finite(span, "fc.weight")
    w[1, 2] = bad
    v, span = quantise(w, 4)
    with pytest.raises(ValueError, match=r"fc\.weight has elements that are infinite or NaN"):
        check_finite(span, "fc.weight")
    if quantise in (symmetric, asymmetric):
        assert v[1].isnan().any(), "where nothing checks, it shows"
        assert not v[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_groups_are_runs_of_elements_in_fp32(dtype: torch.dtype) -> None:
    value = torch.arange(12.0).reshape(3, 4).to(dtype)
    rows = grouped(value, 6, "w")
    assert rows.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert rows.tolist() == [[float(2 * i), float(2 * i + 1)] for i in range(6)]
    assert torch.equal(grouped(value.t(), 4, "w")[1], torch.tensor([1.0, 5.0, 9.0], dtype=rows.dtype))
    with pytest.raises(ValueError, match=r"fc\.weight has \(3, 4\) = 12 elements, which cannot be cut into 5 groups"):
        grouped(value, 5, "fc.weight")


def test_gradients_go_straight_through() -> None:
    w = torch.randn(3, 4, requires_grad=True)
    factor = torch.randn(3, 4)
    rounded = symmetric(w, 3)[0]
    v = straight_through(w, rounded)
    assert torch.equal(v, rounded)
    (v * factor).sum().backward()
    assert torch.equal(w.grad, factor)
    half = straight_through(w, mixed(w, rounded, 0.25))
    torch.testing.assert_close(half, 0.25 * rounded + 0.75 * w)
    assert mixed(w, rounded, 1.0) is rounded
    with torch.no_grad():
        assert not straight_through(w, rounded).requires_grad


@given(
    bits=st.sampled_from([4, 8]), groups=st.integers(1, 3), size=st.sampled_from([16, 48, 256]), asym=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 99),
    kind=st.sampled_from(["normal", "equal", "zeros", "ties", "tiny"]),
)  # fmt: skip
def test_the_kernels_give_the_same_bits(
    bits: int, groups: int, size: int, asym: bool, dtype: torch.dtype, seed: int, kind: str
) -> None:
    w = torch.randn(groups, size, generator=torch.Generator().manual_seed(seed))
    if kind in ("equal", "zeros"):
        w = torch.full_like(w, 0.0 if kind == "zeros" else -1.7)
    elif kind == "ties":
        w = (w * 8).round() / 2
    elif kind == "tiny":
        w = w * 1e-30
    w = w.to(dtype)
    assert fits(w, groups, bits)
    found, scales = nearest(w, groups, bits, asymmetric=asym)
    wanted, _ = (asymmetric if asym else symmetric)(grouped(w, groups, "w"), bits)
    assert torch.equal(found, wanted.to(dtype))
    check_finite(scales, "w")


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_kernels_show_what_is_not_finite(bad: float, bits: int, asym: bool) -> None:
    for place in (0, 7, 31):
        w = torch.randn(2, 32)
        w[1, place] = bad
        found, scales = nearest(w, 2, bits, asymmetric=asym)
        with pytest.raises(ValueError, match="infinite or NaN"):
            check_finite(scales, "w")
        assert torch.isfinite(found[0]).all()
        assert found[1].isnan().any()


@pytest.mark.parametrize(
    ("value", "groups", "bits"),
    [
        (torch.ones(8, 4), 8, 8), (torch.ones(32, 2).t(), 2, 8), (torch.ones(2, 32), 2, 6),
        (torch.ones(2, 32).double(), 2, 8),
    ],
)  # fmt: skip
def test_what_the_kernels_do_not_take(value: torch.Tensor, groups: int, bits: int) -> None:
    assert not fits(value, groups, bits)


def test_without_the_kernels_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.compression.quantisers.fused._kernels", lambda: None)
    assert not fits(torch.ones(2, 32), 2, 8)
