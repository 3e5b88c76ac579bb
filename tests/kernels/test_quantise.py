"""Quantisation: every instruction set equals the reference, within half a step of what was given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.quantise import dequantise_, quantise, reference

from .cases import DTYPES, SIZES, placed, same_bits, values

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
GROUPS = st.sampled_from([16, 48, 256, 2048, 2**20])


@examples(times=3)
@given(
    n=SIZES, bits=st.sampled_from([8, 4]), group=GROUPS, dtype=st.sampled_from(DTYPES), offset=st.integers(0, 3),
    seed=st.integers(0, 1000), special=st.booleans(), ranks=st.integers(1, 3), factor=st.sampled_from([1.0, 0.5, 0.3]),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    n: int, bits: int, group: int, dtype: torch.dtype, offset: int, seed: int, special: bool, ranks: int, factor: float
) -> None:
    given_ = [placed(values(n, seed + r, special=special), dtype, offset) for r in range(ranks)]
    made = [reference.quantise(x, bits, group, 1, 1) for x in given_]
    q, scales = torch.cat([m[0] for m in made]), torch.cat([m[1] for m in made])
    out = placed(torch.zeros(n), dtype, offset)
    reference.dequantise_(out, q, scales, bits, group, ranks, factor)
    for isa in loading.isas():
        y = placed(torch.zeros(n), dtype, offset)
        with loading.use_isa(isa):
            for x, (mine, s) in zip(given_, made, strict=True):
                found = quantise(x, bits=bits, group_size=group)
                assert torch.equal(found[0], mine), isa
                assert same_bits(found[1], s), isa
            dequantise_(y, q, scales, bits=bits, group_size=group, ranks=ranks, factor=factor)
        assert same_bits(y, out), isa


@examples(times=3)
@given(n=SIZES, bits=st.sampled_from([8, 4]), seed=st.integers(0, 1000))
def test_it_is_within_half_a_step(n: int, bits: int, seed: int) -> None:
    """|x - q·s| <= s/2 (1 + 2^-21) + 2^-22 |x|.

    t = fl(x·fl(Q/m)) is within 2·2^-24·(1 + 2^-24) relatively of x·Q/m, rounding to an integer adds 1/2, s = fl(m/Q)
    and fl(q·s) round once each: 2^-22 |x| covers the four, and the factor on s/2 what they do to the half.
    """
    x, y = values(n, seed), torch.empty(n)
    q, s = quantise(x, bits=bits, group_size=64)
    dequantise_(y, q, s, bits=bits, group_size=64)
    step = s.double().repeat_interleave(64)[:n]
    bound = step / 2 * (1 + 2**-21) + 2.0**-22 * x.double().abs()
    assert bool(((x.double() - y.double()).abs() <= bound).all())
    assert int(q.abs().max() if n and bits == 8 else 0) <= 127


@examples(times=3)
@given(
    nodes=st.integers(1, 4), local=st.integers(1, 4), groups=st.integers(1, 3), bits=st.sampled_from([8, 4]),
    seed=st.integers(0, 100),
)  # fmt: skip
def test_the_swizzled_layout_puts_piece_n_l_at_l_n(nodes: int, local: int, groups: int, bits: int, seed: int) -> None:
    x = values(nodes * local * groups * 32, seed)
    q, s = quantise(x, bits=bits, group_size=32)
    mine, scales = quantise(x, bits=bits, group_size=32, swizzle=(nodes, local))
    assert torch.equal(mine.view(local, nodes, -1), q.view(nodes, local, -1).transpose(0, 1))
    assert torch.equal(scales.view(local, nodes, -1), s.view(nodes, local, -1).transpose(0, 1))
    assert torch.equal(reference.quantise(x, bits, 32, nodes, local)[0], mine)


def test_long_tensors_and_threads_change_nothing() -> None:
    x = values(2**20 + 77, 0)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out = torch.empty_like(x)
        q, s = quantise(x, bits=4)
        dequantise_(out, q, s, bits=4)
        results.append((q, s, out))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x = torch.ones(100)
    for group in (0, -16, 24, 2**20 + 16):
        with pytest.raises(ValueError, match=f"group_size={group}; it must be a multiple of 16"):
            quantise(x, group_size=group)
    with pytest.raises(ValueError, match="bits=3; it must be 8 or 4"):
        quantise(x, bits=3)
    with pytest.raises(ValueError, match=r"swizzle=\(2, 3\) cuts 100 elements"):
        quantise(x, group_size=16, swizzle=(2, 3))
    with pytest.raises(ValueError, match="contiguous"):
        quantise(torch.ones(10, 10).t())
    q, s = quantise(x)
    for wrong in ((q[:-1], s), (q.int(), s), (q, torch.ones(2)), (q, s.half())):
        with pytest.raises(ValueError, match=r"^(q|scales)"):
            dequantise_(torch.empty(100), *wrong)
    with pytest.raises(ValueError, match="ranks=0"):
        dequantise_(torch.empty(100), q, s, ranks=0)


def test_opcheck() -> None:
    for n in (0, 5, 200):
        x = torch.randn(n)
        torch.library.opcheck(torch.ops.zoo.quantise.default, (x, 4, 16, 1, 1))
        q, s = quantise(x, bits=4, group_size=16)
        torch.library.opcheck(torch.ops.zoo.dequantise_.default, (x, q, s, 4, 16, 1, 0.5))
