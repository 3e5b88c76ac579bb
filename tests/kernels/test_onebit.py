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
from zoo.kernels.onebit import compress_, compress_mean_, decompress_, owed_, reference, wire_bytes

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
    bits, scales = reference.compress_(c, None, error if fed_back else None, None, None, group)
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
@given(
    n=SIZES, dtype=st.sampled_from(DTYPES), group=st.sampled_from([64, 128, 2048]), offset=st.integers(0, 3),
    seed=st.integers(0, 1000), special=st.booleans(),
)  # fmt: skip
def test_the_next_step_takes_what_is_owed_on_its_way(
    n: int, dtype: torch.dtype, group: int, offset: int, seed: int, special: bool
) -> None:
    """x + (c - y) in one pass has the bits of owed_ and compress_ one after the other; x, c and y stay as they are."""
    x = placed(values(n, seed, special=special), dtype, offset)
    before = placed(values(n, seed + 1, special=special), torch.float32, offset)
    sent = reference.compress_(before, None, None, None, None, group)
    error, c = torch.empty(n), torch.empty(n)
    reference.owed_(error, before, *sent, group)
    expected = reference.compress_(c, x, error, None, None, group)
    plain = torch.empty(n)
    uncorrected = reference.compress_(plain, x, None, None, None, group)
    assert same_bits(plain, x.float())
    for isa in (*loading.isas(), None):
        given_, kept, out = x.clone(), placed(before, torch.float32, offset), placed(torch.zeros(n), torch.float32, 1)
        with loading.use_isa(isa) if isa is not None else loading.use_mode("reference"):
            found = compress_(given_, kept, group, out=out, sent=sent)
            assert same_bits(given_, x)
            assert same_bits(kept, before)
            in_place = compress_(given_, kept, group, out=kept, sent=sent)
            first = placed(torch.zeros(n), torch.float32, offset)
            alone = compress_(given_, None, group, out=first)
        for mine, theirs in ((found, expected), (in_place, expected), (alone, uncorrected)):
            assert torch.equal(mine[0], theirs[0]), isa
            assert same_bits(mine[1], theirs[1]), isa
        assert [same_bits(a, b) for a, b in ((out, c), (kept, c), (first, plain))] == [True] * 3, isa


@examples(times=3)
@given(
    n=SIZES, group=st.sampled_from([64, 128, 2048]), ranks=st.integers(1, 5), more=st.integers(0, 2),
    seed=st.integers(0, 1000), special=st.booleans(), fed_back=st.booleans(),
)  # fmt: skip
def test_a_server_makes_the_mean_on_its_way(
    n: int, group: int, ranks: int, more: int, seed: int, special: bool, fed_back: bool
) -> None:
    """The mean of wires in one pass has the bits of decompress_ for each, times 1/D, and compress_."""
    row = -(-wire_bytes(n, group) // 4) * 4 + 4 * more
    wires, mean = torch.full((ranks, row), 0x55, dtype=torch.uint8), torch.empty(n)
    for rank in range(ranks):
        x = values(n, seed + rank, special=special and rank == 1)
        bits, scales = reference.compress_(x, None, None, None, None, group)
        wires[rank, : scales.nbytes] = scales.view(torch.uint8)
        wires[rank, scales.nbytes : scales.nbytes + bits.nbytes] = bits
        reference.decompress_(mean, bits, scales, group, rank > 0)
    mean *= 1.0 / ranks
    before = values(n, seed + 9)
    sent = reference.compress_(before, None, None, None, None, group) if fed_back else None
    c, error = torch.empty(n), torch.empty(n)
    if sent is not None:
        reference.owed_(error, before, *sent, group)
    expected = reference.compress_(c, mean, error if fed_back else None, None, None, group)
    for isa in (*loading.isas(), None):
        out, kept = placed(torch.zeros(n), torch.float32, more), before.clone()
        with loading.use_isa(isa) if isa is not None else loading.use_mode("reference"):
            found = compress_mean_(out, wires, kept if fed_back else None, group, sent=sent)
        assert torch.equal(found[0], expected[0]), isa
        assert [same_bits(a, b) for a, b in ((found[1], expected[1]), (out, c), (kept, before))] == [True] * 3, isa


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


@pytest.mark.parametrize("n", [2**20 + 77, 2**22 + 77])
def test_long_tensors_and_threads_change_nothing(n: int) -> None:
    """The longer ones are written past the caches."""
    x, owed = values(n, 0), values(n, 1)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        c, error, out = x.clone(), owed.clone(), torch.empty_like(x)
        bits, scales = compress_(c, error)
        decompress_(out, bits, scales)
        owed_(error, c, bits, scales)
        after = torch.empty_like(x)
        results.append((bits, scales, c, error, out, after, *compress_(x, c, out=after, sent=(bits, scales))))
        assert torch.equal(after, x + error)
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
    with pytest.raises(ValueError, match=r"out.*(Half|float16)"):
        compress_(x, e, out=e.half())
    with pytest.raises(ValueError, match=r"x.*100"):
        compress_(x, out=torch.empty(99))
    with pytest.raises(ValueError, match="go together"):
        compress_(x, None, out=e, sent=(bits, scales))
    with pytest.raises(ValueError, match=r"bits.*13"):
        compress_(x, e, sent=(bits[:-1], scales))
    wires = torch.zeros(2, 20, dtype=torch.uint8)
    for wrong_wires in (wires[:0], wires[:, :16].contiguous(), wires[:, :18].contiguous(), wires.view(-1)):
        with pytest.raises(ValueError, match=r"wires"):
            compress_mean_(e, wrong_wires)
    with pytest.raises(ValueError, match=r"wires.*(Char|int8)"):
        compress_mean_(e, wires.view(torch.int8))


def test_autograd_notices_what_was_changed_and_nothing_else() -> None:
    x, w = torch.ones(100), torch.ones(100, requires_grad=True)
    y = (w * x).sum()
    compress_(x)  # reads alone
    y.backward(retain_graph=True)
    compress_(x, torch.zeros(100))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.dear
def test_opcheck() -> None:
    # Each length and each dtype: what is checked is how they are declared.
    for n, dtype in zip(itertools.cycle((0, 5, 200)), DTYPES, strict=False):
        x, e = torch.randn(n).to(dtype), torch.zeros(n)
        bits, scales = compress_(x, None, 64)
        opcheck = torch.library.opcheck
        opcheck(torch.ops.zoo.onebit_compress_.default, (x.float(), None, e, None, None, 64))
        opcheck(torch.ops.zoo.onebit_compress_.default, (x, None, None, None, None, 64))
        opcheck(torch.ops.zoo.onebit_compress_.default, (torch.empty(n), x, e, bits, scales, 64))
        wires = torch.zeros(2, wire_bytes(n, 64) // 4 * 4 + 4, dtype=torch.uint8)
        opcheck(torch.ops.zoo.onebit_compress_mean_.default, (torch.empty(n), wires, e, bits, scales, 64))
        opcheck(torch.ops.zoo.onebit_owed_.default, (e, x.float(), bits, scales, 64))
        opcheck(torch.ops.zoo.onebit_decompress_.default, (x, bits, scales, 64, True))
