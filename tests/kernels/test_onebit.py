"""1-bit compression: every instruction set equals the reference, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.onebit import compress_, decompress_, owed_, reference, wire_bytes

from .cases import DTYPES, SIZES, placed, same_bits, values

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


@examples(times=3)
@given(
    n=SIZES, dtype=st.sampled_from(DTYPES), group=st.sampled_from([64, 128, 512, 2048, 2**20]),
    offset=st.integers(0, 3), seed=st.integers(0, 1000), special=st.booleans(), add=st.booleans(),
)  # fmt: skip
def test_every_instruction_set_equals_the_reference(
    n: int, dtype: torch.dtype, group: int, offset: int, seed: int, special: bool, add: bool
) -> None:
    fed_back = dtype is torch.float32 and seed % 2 == 0
    x = placed(values(n, seed, special=special), dtype, offset)
    owed = placed(values(n, seed + 1), torch.float32, offset)
    c, error = x.clone(), owed.clone()
    bits, scales = reference.compress_(c, error if fed_back else None, group)
    reference.owed_(error, c.float(), bits, scales, group)
    out = placed(values(n, seed + 2), dtype, offset)
    start = out.clone()
    reference.decompress_(out, bits, scales, group, add)
    assert wire_bytes(n, group) == bits.nbytes + scales.nbytes
    for isa in loading.isas():
        z, e, y = placed(x, dtype, offset), placed(owed, torch.float32, offset), placed(start, dtype, offset)
        with loading.use_isa(isa):
            b, s = compress_(z, e if fed_back else None, group)
            assert same_bits(e, owed), "a step that is skipped has changed the error"
            owed_(e, z.float(), b, s, group)
            decompress_(y, b, s, group, add=add)
            in_place = z.float().clone()
            owed_(in_place, in_place, b, s, group)
        assert torch.equal(b, bits)
        for mine, theirs in ((s, scales), (z, c), (e, error), (y, out), (in_place, error)):
            assert same_bits(mine, theirs), isa


@examples(times=3)
@given(n=SIZES, seed=st.integers(0, 1000))
def test_what_was_sent_and_what_is_kept_is_what_was_given(n: int, seed: int) -> None:
    """y + e' = x + e; e' = fl(c - y) and c = fl(x + e) each round once: |y + e' - x - e| <= 2^-24 (|e'| + |c|)."""
    x, error, y = values(n, seed), values(n, seed + 1), torch.empty(n)
    given_ = x.double() + error.double()
    bits, scales = compress_(x, error, 64)
    decompress_(y, bits, scales, 64)
    owed_(error, x, bits, scales, 64)
    gap = (y.double() + error.double() - given_).abs()
    assert bool((gap <= 1.01 * 2.0**-24 * (error.double().abs() + given_.abs())).all())


def test_long_tensors_and_threads_change_nothing() -> None:
    x, owed = values(2**20 + 77, 0), values(2**20 + 77, 1)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        c, error, out = x.clone(), owed.clone(), torch.empty_like(x)
        bits, scales = compress_(c, error)
        decompress_(out, bits, scales)
        owed_(error, c, bits, scales)
        results.append((bits, scales, c, error, out))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert wire_bytes(x.numel()) * 30 <= x.nbytes


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    x, e = torch.ones(100), torch.zeros(100)
    for group in (0, -64, 63, 100, 2**20 + 64):
        with pytest.raises(ValueError, match=f"group_size={group}; it must be a multiple of 64"):
            compress_(x, e, group)
    with pytest.raises(ValueError, match=r"error.*99"):
        compress_(x, torch.zeros(99))
    with pytest.raises(ValueError, match=r"error.*(Half|float16)"):
        compress_(x, e.half())
    with pytest.raises(ValueError, match=r"x.*\b(Long|int64)"):
        compress_(x.long(), e)
    with pytest.raises(ValueError, match="contiguous"):
        compress_(torch.ones(10, 10).t(), e)
    bits, scales = compress_(x, e)
    for wrong in ((bits[:-1], scales), (bits.int(), scales), (bits, torch.ones(2)), (bits, scales.double())):
        with pytest.raises(ValueError, match=r"(bits|scales)"):
            decompress_(torch.empty(100), *wrong)
        with pytest.raises(ValueError, match=r"(bits|scales)"):
            owed_(e, x, *wrong)
    with pytest.raises(ValueError, match=r"c.*99"):
        owed_(e, torch.ones(99), bits, scales)
    with pytest.raises(ValueError, match=r"x.*(Half|float16)"):  # there is no room for c
        compress_(x.half(), e)


def test_opcheck() -> None:
    for n, dtype in itertools.product((0, 5, 200), DTYPES):
        x, e = torch.randn(n).to(dtype), torch.zeros(n)
        torch.library.opcheck(torch.ops.zoo.onebit_compress_.default, (x.float(), e, 64))
        torch.library.opcheck(torch.ops.zoo.onebit_compress_.default, (x, None, 64))
        bits, scales = compress_(x, None, 64)
        torch.library.opcheck(torch.ops.zoo.onebit_owed_.default, (e, x.float(), bits, scales, 64))
        torch.library.opcheck(torch.ops.zoo.onebit_decompress_.default, (x, bits, scales, 64, True))
