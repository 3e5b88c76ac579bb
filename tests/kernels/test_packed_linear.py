"""Linear layers on packed weights: packing loses nothing, every way of multiplying gives the formula of the header."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu.packed import exact_weight, integers
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.packed_linear import PackedWeight, pack, pack_weight, packed_linear, unpack, unpack_weight
from zoo.kernels.packed_linear.ops import packed_linear_backward
from zoo.kernels.quantise import dequantise_, quantise, quantise_asymmetric

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
BITS, ROWS = st.sampled_from([8, 4]), st.sampled_from([0, 1, 5, 31, 32, 33, 64, 96, 100, 160])
# (K, G): one piece of columns, several, pieces of a group, groups that are no power of two; 48 divides no piece.
GROUPS = st.sampled_from([(16, 16), (48, 16), (144, 48), (256, 32), (320, 320), (576, 64), (768, 768), (400, 80)])
TOKENS = st.sampled_from([0, 1, 2, 3, 4, 6, 7, 13, 16, 17, 40])


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """In fp64, rounded once."""
    y = x.double() @ unpack_weight(weight).double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


# Packing -----------------------------------------------------------------------------------------------------------


@examples(times=3)
@given(rows=ROWS, shape=GROUPS, bits=BITS, symmetric=st.booleans(), seed=st.integers(0, 99))
def test_packing_changes_places_only(rows: int, shape: tuple[int, int], bits: int, symmetric: bool, seed: int) -> None:
    columns, group = shape
    x = values(rows * columns, seed).view(rows, columns)
    given_ = (quantise if symmetric else quantise_asymmetric)(x, bits=bits, group_size=group)
    packed = pack_weight(x, bits=bits, group_size=group, symmetric=symmetric)
    assert all(same_bits(a, b) for a, b in zip(given_, unpack(packed), strict=False))
    assert (packed.minima is None) is symmetric
    assert packed.num_bytes == rows * columns * bits // 8 + (4 if symmetric else 8) * rows * (columns // group)
    assert pack(*unpack(packed), shape=packed.shape, bits=bits, group_size=group).q.equal(packed.q)
    if symmetric:
        out = torch.empty(rows, columns)
        dequantise_(out, *given_, bits=bits, group_size=group)
        assert same_bits(unpack_weight(packed), out)


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_lie_where_the_header_says(bits: int) -> None:
    rows, columns = 70, 48
    codes = torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(0))
    flat = codes.view(-1)
    q = (flat if bits == 8 else flat[::2] | flat[1::2] << 4).to(torch.uint8)
    numbers = torch.arange(rows * 3).float()
    packed = pack(q, numbers, numbers, shape=(rows, columns), bits=bits, group_size=16)
    for row in range(64):
        r = row % 32
        for k in range(columns):
            line = (row // 32 * (columns // 2) + k // 2) * 8 * bits
            if bits == 8:
                found = int(packed.q[line + 16 * (r % 16 // 4) + 8 * (r // 16) + 2 * (r % 4) + k % 2])
            else:
                found = int(packed.q[line + 2 * (r % 16) + k % 2]) >> (4 if r >= 16 else 0) & 15
            assert found == int(codes[row, k])
            assert float(packed.scales[row // 32 * 96 + k // 16 * 32 + r]) == float(row * 3 + k // 16)
    assert torch.equal(packed.q[64 * columns * bits // 8 :], q[64 * columns * bits // 8 :])
    assert torch.equal(packed.scales[64 * 3 :], numbers[64 * 3 :])


# Products ----------------------------------------------------------------------------------------------------------


@examples(times=4)
@given(
    tokens=TOKENS, rows=ROWS, shape=GROUPS, bits=BITS, symmetric=st.booleans(), dtype=st.sampled_from(DTYPES),
    bias=st.sampled_from([None, *DTYPES]), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_and_the_reference_give_the_exact_product(
    tokens: int, rows: int, shape: tuple[int, int], bits: int, symmetric: bool, dtype: torch.dtype,
    bias: torch.dtype | None, strided: bool, seed: int,
) -> None:  # fmt: skip
    columns, group = shape
    weight = exact_weight(rows, columns, group, bits=bits, symmetric=symmetric, seed=seed)
    x = integers(columns, tokens, seed=seed, dtype=dtype).t() if strided else integers(tokens, columns, seed=seed)
    x = x.to(dtype)
    b = None if bias is None else integers(rows, seed=seed + 1, dtype=bias)
    expected = product(x, weight, b)
    for isa in loading.isas():
        with loading.use_isa(isa):
            assert same_bits(packed_linear(x, weight, b) + 0.0, expected + 0.0), isa
            dy = integers(tokens, rows, seed=seed + 2, dtype=dtype)
            dx = (dy.double() @ unpack_weight(weight).double()).to(dtype)
            assert same_bits(packed_linear_backward(dy, weight) + 0.0, dx + 0.0), isa
    with loading.use_mode("reference"):
        assert same_bits(packed_linear(x, weight, b) + 0.0, expected + 0.0)


@examples(times=2)
@given(
    tokens=TOKENS, rows=ROWS, shape=GROUPS, bits=BITS, symmetric=st.booleans(), dtype=st.sampled_from(DTYPES),
    shift=st.sampled_from([0.0, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_as_near_to_the_product_as_the_header_says(
    tokens: int, rows: int, shape: tuple[int, int], bits: int, symmetric: bool, dtype: torch.dtype, shift: float,
    seed: int,
) -> None:  # fmt: skip
    columns, group = shape
    weight = pack_weight(
        values(rows * columns, seed).view(rows, columns) + shift, bits=bits, group_size=group, symmetric=symmetric
    )
    x = values(tokens * columns, seed + 1).view(tokens, columns).to(dtype)
    _, scales, minima = unpack(weight)
    limit = 2**bits - 1 if not symmetric else 2 ** (bits - 1) - 1
    most = scales.double() * limit + (0.0 if minima is None else 2 * minima.double().abs())
    size = x.double().abs() @ most.repeat_interleave(group).view(rows, columns).t()
    exactly = x.double() @ unpack_weight(weight, torch.float32).double().t()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    for isa in loading.isas():
        with loading.use_isa(isa):
            by_tiles = tokens > 16 and isa != "avx512"
            sums = columns if by_tiles else min(group, 256) + math.ceil(columns / min(group, 128))
            bound = (sums + 8) * 2.0**-24 * size + 2.0**-126 * columns * limit
            if by_tiles or (dtype is torch.bfloat16 and tokens > 16):
                bound = bound + (2.0**-9 * size if dtype is torch.bfloat16 else 0.0)
            bound = bound * (1 + unit) + unit * exactly.abs() + (2.0**-25 if dtype is torch.float16 else 2.0**-133)
            assert bool(((packed_linear(x, weight).double() - exactly).abs() <= bound).all()), isa


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_neither_threads_nor_other_tokens_or_rows_change_a_row(dtype: torch.dtype, bits: int, symmetric: bool) -> None:
    columns = 512
    w, x = values(900 * columns, 0).view(900, columns), values(521 * columns, 1).view(521, columns).to(dtype)
    weight = pack_weight(w, bits=bits, group_size=64, symmetric=symmetric)
    found, grads = [], []
    for threads in THREADS:
        with num_threads(threads):
            found.append(packed_linear(x[:16], weight))
            dy = found[0] * 2.0**-12  # in fp16 sums of 900 larger ones would be infinite
            grads.append(packed_linear_backward(dy, weight))
            assert same_bits(packed_linear_backward(dy, weight), grads[-1])
            assert same_bits(packed_linear(x[3:4], weight), found[0][3:4])
    assert all(same_bits(y, found[0]) for y in found)
    # The backward ends in torch's matrix product, whose sums of 900 terms may be cut by threads on some CPUs.
    grown = packed_linear_backward(
        dy.abs().float(), pack_weight(w.abs(), bits=bits, group_size=64, symmetric=symmetric)
    )
    bound = 2 * 900 * torch.finfo(torch.float32).eps * float(grown.abs().max()) + torch.finfo(dtype).eps * float(
        grads[0].abs().max()
    )
    assert math.isfinite(bound)
    for dx in grads:
        torch.testing.assert_close(dx.float(), grads[0].float(), rtol=0, atol=bound)
    part = pack_weight(w[32:64], bits=bits, group_size=64, symmetric=symmetric)
    assert same_bits(packed_linear(x[:16], part), found[0][:, 32:64])
    if loading.isas()[-1] == "avx512" and dtype is not torch.bfloat16:  # the fused way for any number of tokens
        assert same_bits(packed_linear(x, weight)[:16], found[0])


@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_with_bad_groups_are_not_finite_and_zeros_and_equal_groups_are_exact(
    tokens: int, dtype: torch.dtype, bits: int, symmetric: bool
) -> None:
    w = values(68 * 64, 0).view(68, 64)
    w[5, 40], w[66, 3], w[7], w[8, :32] = float("nan"), float("inf"), 0.0, 0.5
    w[8, 32:] = 0.0 if symmetric else -2.0
    weight = pack_weight(w, bits=bits, group_size=32, symmetric=symmetric)
    x = integers(tokens, 64, seed=0, dtype=dtype)
    x[:, 0] = 1.0
    for isa in loading.isas():
        with loading.use_isa(isa):
            y, dx = packed_linear(x, weight), packed_linear_backward(torch.ones(tokens, 68, dtype=dtype), weight)
        bad = ~y.isfinite()
        assert bool(bad[:, [5, 66]].all())
        assert not bool(bad[:, [i for i in range(68) if i not in (5, 66)]].any())
        assert not y[:, 7].any()
        first, second = (x.double()[:, part].sum(1) for part in (slice(0, 32), slice(32, 64)))
        torch.testing.assert_close(
            y[:, 8].double(), 0.5 * first - (0.0 if symmetric else 2.0) * second, rtol=2**-8, atol=2**-16
        )
        assert bool((~dx.isfinite())[:, 32:].all())
        assert bool((~dx.isfinite())[:, :32].all())
        assert bool((~packed_linear(x * float("inf"), weight).isfinite()).all())


def test_one_scale_a_row_and_leading_dims() -> None:
    w, x = values(40 * 48, 0).view(40, 48), integers(2, 3, 48, seed=1)
    weight = pack_weight(w)
    assert (weight.group_size, weight.scales.numel(), weight.bits) == (48, 40, 8)
    assert packed_linear(x, weight).shape == (2, 3, 40)
    torch.testing.assert_close(packed_linear(x, weight), x @ unpack_weight(weight).t())
    assert same_bits(packed_linear(x[0, 0], weight), packed_linear(x, weight)[0, 0])


# Gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_of_x_and_bias(bits: int, symmetric: bool) -> None:
    weight = exact_weight(40, 48, 16, bits=bits, symmetric=symmetric, seed=0)
    x = torch.randn(5, 48, dtype=torch.float64, requires_grad=True)
    b = torch.randn(40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: packed_linear(x, weight, b), (x, b))
    for dtype in DTYPES:
        low = integers(2, 3, 48, seed=0, dtype=dtype).requires_grad_()
        bias = integers(40, seed=1, dtype=dtype).requires_grad_()
        dy = integers(2, 3, 40, seed=2, dtype=dtype)
        packed_linear(low, weight, bias).backward(dy)
        assert low.grad is not None
        assert bias.grad is not None
        assert same_bits(low.grad + 0.0, (dy.double() @ unpack_weight(weight).double()).to(dtype) + 0.0)
        assert same_bits(bias.grad + 0.0, dy.double().sum((0, 1)).to(dtype) + 0.0)
    alone = integers(48, seed=0).requires_grad_()
    bias = torch.zeros(40, requires_grad=True)
    packed_linear(alone, weight, bias).sum().backward()
    assert bias.grad is not None
    assert bool((bias.grad == 1).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_low_rank_adapters_train_on_packed_weights(bits: int) -> None:
    """y = packed_linear(x) + B·A·x: with the losses of the same adapters on the dequantised weights."""
    torch.manual_seed(0)
    plain = [torch.nn.Linear(32, 48), torch.nn.Linear(48, 16)]
    packed = [pack_weight(layer.weight, bits=bits, group_size=16) for layer in plain]
    x, target = torch.randn(64, 32), torch.randn(64, 16)
    downs = [torch.randn(4, layer.in_features) / layer.in_features**0.5 for layer in plain]

    def losses(*, dequantised: bool) -> list[float]:
        adapters = [
            (torch.nn.Parameter(down.clone()), torch.nn.Parameter(torch.zeros(layer.out_features, 4)))
            for down, layer in zip(downs, plain, strict=True)
        ]
        optimizer = torch.optim.Adam([p for pair in adapters for p in pair], lr=0.02)
        found = []
        for _ in range(60):
            hidden = x
            for i, (weight, layer, (down, up)) in enumerate(zip(packed, plain, adapters, strict=True)):
                bias = layer.bias.detach()
                if dequantised:
                    y = F.linear(hidden, unpack_weight(weight) + up @ down, bias)
                else:
                    y = packed_linear(hidden, weight, bias) + F.linear(F.linear(hidden, down), up)
                hidden = F.gelu(y) if i == 0 else y
            loss = F.mse_loss(hidden, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    found = losses(dequantised=False)
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(found, losses(dequantised=True), rtol=1e-3, atol=1e-4)


# Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    w = values(40 * 48, 0).view(40, 48)
    weight = pack_weight(w, group_size=16)
    x = torch.ones(3, 48)
    for group in (0, 24, 32, 64):
        with pytest.raises(ValueError, match=f"group_size={group} for rows of 48 elements; it must be a multiple of"):
            pack_weight(w, group_size=group)
        with pytest.raises(ValueError, match=f"group_size={group} for rows of 48 elements; it must be a multiple of"):
            packed_linear(x, weight._replace(group_size=group))
    with pytest.raises(ValueError, match="bits=2; it must be 8 or 4"):
        pack_weight(w, bits=2, group_size=16)
    with pytest.raises(ValueError, match="bits=2; it must be 8 or 4"):
        packed_linear(x, weight._replace(bits=2))
    with pytest.raises(ValueError, match=r"weight has shape \(1920,\); it must have 2 dims"):
        pack_weight(w.view(-1))
    with pytest.raises(ValueError, match=r"x has shape \(3, 32\); for W of shape \(40, 48\) its last dim must be 48"):
        packed_linear(torch.ones(3, 32), weight)
    with pytest.raises(ValueError, match=r"x is (torch\.int32|Int)"):
        packed_linear(x.int(), weight)
    with pytest.raises(ValueError, match=r"^bias"):
        packed_linear(x, weight, torch.ones(39))
    for name, wrong in (("q", weight.q[:-1]), ("q", weight.q.view(torch.uint8)), ("scales", weight.scales.half())):
        with pytest.raises(ValueError, match=f"^{name} is"):
            packed_linear(x, weight._replace(**{name: wrong}))
        with pytest.raises(ValueError, match=f"^{name} is"):
            unpack(weight._replace(**{name: wrong}))
    with pytest.raises(ValueError, match="scales or minima require a gradient"):
        packed_linear(x, weight._replace(scales=weight.scales.clone().requires_grad_()))
    with pytest.raises(ValueError, match=r"grad_y has shape \(3, 48\); for W of shape \(40, 48\) .* must be 40"):
        packed_linear_backward(x, weight)
    with pytest.raises(ValueError, match="codes of -128"):
        pack(torch.full((1920,), -128, dtype=torch.int8), torch.ones(120), shape=(40, 48), bits=8, group_size=16)


@pytest.mark.dear
def test_opcheck() -> None:
    ops = torch.ops.zoo
    for tokens in (0, 3, 20):
        for symmetric in (True, False):
            weight = pack_weight(torch.randn(40, 48), bits=4, group_size=16, symmetric=symmetric)
            x, b = torch.randn(tokens, 48, requires_grad=True), torch.randn(40, requires_grad=True)
            q, scales, minima = weight[:3]
            torch.library.opcheck(ops.packed_linear.default, (x, q, scales, minima, b, 40, 4, 16, False))
            dy = torch.randn(tokens, 40)
            torch.library.opcheck(ops.packed_linear_backward.default, (dy, q, scales, minima, 48, 4, 16))
