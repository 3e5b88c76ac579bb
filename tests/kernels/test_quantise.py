"""Quantisation: every instruction set equals the reference, within half a step of what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.quantise import dequantise_, dequantise_asymmetric_, quantise, quantise_asymmetric, reference

from .cases import DTYPES, SIZES, placed, same_bits, values

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
BOTH: dict[bool, Any] = {
    True: (quantise, dequantise_, reference.quantise, reference.dequantise_),
    False: (
        quantise_asymmetric, dequantise_asymmetric_, reference.quantise_asymmetric, reference.dequantise_asymmetric_,
    ),
}  # fmt: skip
"""Symmetric? → the operations, and their references."""
GROUPS = st.sampled_from([16, 48, 256, 2048, 2**20])


@examples(times=3)
@given(
    n=SIZES, bits=st.sampled_from([8, 4]), group=GROUPS, dtype=st.sampled_from(DTYPES), offset=st.integers(0, 3),
    seed=st.integers(0, 1000), special=st.booleans(), ranks=st.integers(1, 3), factor=st.sampled_from([1.0, 0.5, 0.3]),
    symmetric=st.booleans(), shift=st.sampled_from([0.0, 3.0, -100.0]),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    n: int, bits: int, group: int, dtype: torch.dtype, offset: int, seed: int, special: bool, ranks: int,
    factor: float, symmetric: bool, shift: float,
) -> None:  # fmt: skip
    to, back, reference_to, reference_back = BOTH[symmetric]
    given_ = [placed(values(n, seed + r, special=special) + shift, dtype, offset) for r in range(ranks)]
    made = [reference_to(x, bits, group, 1, 1) for x in given_]
    parts = [torch.cat(part) for part in zip(*made, strict=True)]
    out = placed(torch.zeros(n), dtype, offset)
    reference_back(out, *parts, bits, group, ranks, factor)
    for isa in loading.isas():
        y = placed(torch.zeros(n), dtype, offset)
        with loading.use_isa(isa):
            for x, mine in zip(given_, made, strict=True):
                found = to(x, bits=bits, group_size=group)
                assert all(same_bits(a, b) for a, b in zip(found, mine, strict=True)), isa
            back(y, *parts, bits=bits, group_size=group, ranks=ranks, factor=factor)
        assert same_bits(y, out), isa


@examples(times=3)
@given(
    n=SIZES, bits=st.sampled_from([8, 4]), seed=st.integers(0, 1000),
    scale=st.sampled_from([1.0, 2.0**-126, 2.0**-145, 2.0**120]),
)  # fmt: skip
def test_it_is_within_half_a_step(n: int, bits: int, seed: int, scale: float) -> None:
    """|x - q·s| <= s/2 (1 + 2^-21) + 2^-22 |x| + 2^-120.

    t = fl(x·fl(Q/m)) is within 2·2^-24·(1 + 2^-24) relatively of x·Q/m, rounding to an integer adds 1/2, s = fl(m/Q)
    and fl(q·s) round once each: 2^-22 |x| covers the four, and the factor on s/2 what they do to the half. Where Q/m
    overflows, the codes are 0 and ±Q, and all is below Q/FLT_MAX < 2^-120, which is also more than all roundings of
    subnormals.
    """
    x, y = values(n, seed) * scale, torch.empty(n)
    q, s = quantise(x, bits=bits, group_size=64)
    dequantise_(y, q, s, bits=bits, group_size=64)
    step = s.double().repeat_interleave(64)[:n]
    bound = step / 2 * (1 + 2**-21) + 2.0**-22 * x.double().abs() + 2.0**-120
    assert bool(((x.double() - y.double()).abs() <= bound).all())
    assert int(q.abs().max() if n and bits == 8 else 0) <= 127


@examples(times=3)
@given(
    n=SIZES, bits=st.sampled_from([8, 4]), seed=st.integers(0, 1000), shift=st.sampled_from([0.0, 3.0, -100.0]),
    scale=st.sampled_from([1.0, 2.0**-126, 2.0**-145, 2.0**120]),
)  # fmt: skip
def test_asymmetric_is_within_half_a_step(n: int, bits: int, seed: int, shift: float, scale: float) -> None:
    """|x - y| <= s/2·(1 + 2^-12) + 2^-23 |x| + 2^-120, the least element exactly.

    With u = 2^-24, S = (hi - lo)/Q and T = (x - lo)/S: the code is at most 1/2 + 4u·T away from T (four operations
    round once each), s is within 2u of S, s·q rounds once: S/2 + 7u·(x - lo). With x - lo <= 255·S the second is below
    2^-12·S/2, with s for S too. The addition of lo rounds once: u·|y|. Where Q/(hi - lo) overflows, the codes are 0 and
    Q, and all is below Q/FLT_MAX < 2^-120, which is also more than all roundings of subnormals.
    """
    x, y = (values(n, seed) + shift) * scale, torch.empty(n)
    q, s, low = quantise_asymmetric(x, bits=bits, group_size=64)
    dequantise_asymmetric_(y, q, s, low, bits=bits, group_size=64)
    step, least = (t.double().repeat_interleave(64)[:n] for t in (s, low))
    bound = step / 2 * (1 + 2**-12) + 2.0**-23 * x.double().abs() + 2.0**-120
    assert bool(((x.double() - y.double()).abs() <= bound).all())
    assert bool((least <= x.double()).all())
    assert torch.equal(y[x == least], x[x == least])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_equal_numbers_arrive_exactly(bits: int, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 0.1, -3e38, 6e-8, 2.5]).to(dtype).nan_to_num().repeat_interleave(16)
    out = torch.empty_like(x)
    q, s, low = quantise_asymmetric(x, bits=bits, group_size=16)
    dequantise_asymmetric_(out, q, s, low, bits=bits, group_size=16)
    assert torch.equal(out, x)
    assert not q.any()
    assert not s.any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [-float("inf")], [float("inf")] * 32])
def test_a_group_with_a_nan_or_infinity_arrives_as_nan(bits: int, symmetric: bool, bad: list[float]) -> None:
    to, back, _, _ = BOTH[symmetric]
    x, out = values(96, 0), torch.empty(96)
    x[40 - len(bad) // 4 : 40 - len(bad) // 4 + len(bad)] = torch.tensor(bad)
    for isa in loading.isas():
        with loading.use_isa(isa):
            parts = to(x, bits=bits, group_size=32)
            back(out, *parts, bits=bits, group_size=32)
        assert bool(out[32:64].isnan().all()), isa
        assert bool(out[:32].isfinite().all()), isa
        assert bool(out[64:].isfinite().all()), isa


def test_a_range_that_overflows_arrives_as_nan() -> None:
    x, out = torch.full((16,), 3e38), torch.empty(16)
    x[3] = -3e38
    parts = quantise_asymmetric(x, group_size=16)
    dequantise_asymmetric_(out, *parts, group_size=16)
    assert bool(out.isnan().all())


@examples(times=3)
@given(
    nodes=st.integers(1, 4), local=st.integers(1, 4), groups=st.integers(1, 3), bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 100), symmetric=st.booleans(),
)  # fmt: skip
def test_the_swizzled_layout_puts_piece_n_l_at_l_n(
    nodes: int, local: int, groups: int, bits: int, seed: int, symmetric: bool
) -> None:
    x, (to, _, reference_to, _) = values(nodes * local * groups * 32, seed), BOTH[symmetric]
    straight = to(x, bits=bits, group_size=32)
    swizzled = to(x, bits=bits, group_size=32, swizzle=(nodes, local))
    for mine, part in zip(swizzled, straight, strict=True):
        assert torch.equal(mine.view(local, nodes, -1), part.view(nodes, local, -1).transpose(0, 1))
    expected = reference_to(x, bits, 32, nodes, local)
    assert all(same_bits(mine, part) for mine, part in zip(swizzled, expected, strict=True))


@pytest.mark.parametrize("symmetric", [True, False])
def test_long_tensors_and_threads_change_nothing(symmetric: bool) -> None:
    to, back, _, _ = BOTH[symmetric]
    x = values(2**20 + 77, 0)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out = torch.empty_like(x)
        parts = to(x, bits=4)
        back(out, *parts, bits=4)
        results.append((*parts, out))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, symmetric: bool, use_mode: UseMode) -> None:
    use_mode(mode)
    to, back, _, _ = BOTH[symmetric]
    x = torch.ones(100)
    for group in (0, -16, 24, 2**20 + 16):
        with pytest.raises(ValueError, match=f"group_size={group}; it must be a multiple of 16"):
            to(x, group_size=group)
    with pytest.raises(ValueError, match="bits=3; it must be 8 or 4"):
        to(x, bits=3)
    with pytest.raises(ValueError, match=r"x is (torch\.int32|Int)"):
        to(x.int())
    with pytest.raises(ValueError, match=r"swizzle=\(2, 3\) cuts 100 elements"):
        to(x, group_size=16, swizzle=(2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        to(torch.ones(10, 10).t())
    q, *of_groups = to(x)
    other = torch.uint8 if symmetric else torch.int8
    for wrong in (q[:-1], q.int(), q.view(other)):
        with pytest.raises(ValueError, match=r"^q is"):
            back(torch.empty(100), wrong, *of_groups)
    for i, name in enumerate(["scales", "minima"][: len(of_groups)]):
        for wrong in (torch.ones(2), of_groups[i].half()):
            with pytest.raises(ValueError, match=f"^{name} is"):
                back(torch.empty(100), q, *of_groups[:i], wrong, *of_groups[i + 1 :])
    with pytest.raises(ValueError, match="ranks=0"):
        back(torch.empty(100), q, *of_groups, ranks=0)


@pytest.mark.dear
def test_opcheck() -> None:
    ops = torch.ops.zoo
    for n in (0, 5, 200):
        x = torch.randn(n)
        torch.library.opcheck(ops.quantise.default, (x, 4, 16, 1, 1))
        torch.library.opcheck(ops.quantise_asymmetric.default, (x, 4, 16, 1, 1))
        torch.library.opcheck(ops.dequantise_.default, (x, *quantise(x, bits=4, group_size=16), 4, 16, 1, 0.5))
        parts = quantise_asymmetric(x, bits=4, group_size=16)
        torch.library.opcheck(ops.dequantise_asymmetric_.default, (x, *parts, 4, 16, 1, 0.5))
