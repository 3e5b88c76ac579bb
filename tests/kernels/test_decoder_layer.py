"""A decoder layer in two calls: the bits of its operations one by one, with numbers and with codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, same_bits, values
from tests.kernels.conftest import UseMode
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.decoder_layer import (
    Product,
    RmsNorm,
    after_cache,
    attention,
    before_cache,
    feed_forward,
    prepare,
    reference,
)  # fmt: skip
from zoo.kernels.packed_linear import Activations, pack_weight

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
HEADS, GROUPS, DIM, WIDTH, WIDE = 4, 2, 16, 32, 48
NO_CACHE = (None, None, None)
FORWARD = ("norm", "gate_up", "activation", "down")


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (values(rows * columns, seed).view(rows, columns) / columns**0.5).to(dtype)


def product(
    rows: tuple[int, ...], columns: int, dtype: torch.dtype, bits: int, biased: bool, seed: int
) -> Product:  # fmt: skip
    """Of several matrices; of codes they are one."""
    biases = [values(n, seed + 7).to(dtype) for n in rows] if biased else []
    weights = [matrix(n, columns, dtype, seed + i) for i, n in enumerate(rows)]
    if bits == 0:
        return Product(weights, biases, [])
    packed = pack_weight(torch.cat(weights), bits=bits, group_size=16, symmetric=seed % 2 == 0)
    # Of seeds from 4 on they stay exact: without kernels rounding to codes would begin at other bits.
    activations: Activations = "int8" if seed % 10 < 4 else "exact"
    return Product.of_codes(packed, torch.cat(biases) if biases else None, activations=activations)


def arguments(
    batch: int, tokens: int, dtype: torch.dtype, bits: int, biased: bool, normed: bool, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Of both functions, but for q, keys and values."""
    angles = values(batch * tokens * DIM, seed).view(batch, tokens, DIM)
    norm = RmsNorm(values(WIDTH, seed + 1).to(dtype), 1e-5, seed % 3 == 0)
    heads = [RmsNorm(values(DIM, seed + i).to(dtype), 1e-6, False) for i in (2, 3)] if normed else []
    before = {
        "x": values(batch * tokens * WIDTH, seed + 4).view(batch, tokens, WIDTH).to(dtype), "norm": norm,
        "qkv": product((HEADS * DIM, GROUPS * DIM, GROUPS * DIM), WIDTH, dtype, bits, biased, seed),
        "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype), "heads": HEADS, "groups": GROUPS,
        "head_norms": heads,
    }  # fmt: skip
    after = {
        "norm": norm, "scale": 0.3, "out": product((WIDTH,), HEADS * DIM, dtype, bits, biased, seed + 1),
        "gate_up": product((WIDE, WIDE), WIDTH, dtype, bits, biased, seed + 2), "activation": "silu",
        "down": product((WIDTH,), WIDE, dtype, bits, biased, seed + 3),
    }  # fmt: skip
    return before, after


def run(before: dict[str, Any], after: dict[str, Any]) -> tuple[Tensor, Tensor]:
    qkv = before_cache(**before)
    q, k, v = torch.split(qkv.unflatten(2, (-1, DIM)).transpose(1, 2), [HEADS, GROUPS, GROUPS], 1)
    return qkv, after_cache(before["x"], q, k, v, None, **after)


@examples(times=2)
@given(
    batch=st.integers(1, 2), tokens=st.integers(1, 3), dtype=st.sampled_from(DTYPES), bits=st.sampled_from([0, 8, 4]),
    biased=st.booleans(), normed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_has_the_bits_of_its_operations(
    batch: int, tokens: int, dtype: torch.dtype, bits: int, biased: bool, normed: bool, seed: int
) -> None:
    before, after = arguments(batch, tokens, dtype, bits, biased, normed, seed)
    qkv, z = run(before, after)
    norms = before["head_norms"]
    mine = reference.before_cache(
        before["x"], *before["norm"], *before["qkv"], [n.weight for n in norms], [n.eps for n in norms], False,
        before["cos"], before["sin"], *NO_CACHE, HEADS, GROUPS,
    )  # fmt: skip
    q, k, v = torch.split(mine.unflatten(2, (-1, DIM)).transpose(1, 2), [HEADS, GROUPS, GROUPS], 1)
    assert same_bits(qkv, mine)
    other = reference.after_cache(
        before["x"], q, k, v, None, 0.3, *after["out"], *after["norm"], *after["gate_up"], "silu", *after["down"]
    )
    assert same_bits(z, other)
    assert z.shape == before["x"].shape
    made = attention(q, k, v, None, scale=0.3, out=after["out"])
    down, y = feed_forward(made, before["x"], **{key: after[key] for key in FORWARD})
    assert same_bits(z, y + down)


@examples(times=2)
@given(
    batch=st.integers(1, 3), dtype=st.sampled_from(DTYPES), bits=st.sampled_from([0, 8, 4]), biased=st.booleans(),
    normed=st.booleans(), masked=st.booleans(), length=st.integers(1, 9), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_prepared_layer_has_the_bits_of_two_calls(
    batch: int, dtype: torch.dtype, bits: int, biased: bool, normed: bool, masked: bool, length: int, seed: int
) -> None:
    before, after = arguments(batch, 1, dtype, bits, biased, normed, seed)
    layer = prepare(
        before["norm"], before["qkv"], heads=HEADS, groups=GROUPS, head_norms=before["head_norms"],
        second=after["norm"], **{key: after[key] for key in ("scale", "out", "gate_up", "activation", "down")},
    )  # fmt: skip
    assert layer is not None
    room = 9
    keys, values_ = (
        values(batch * GROUPS * room * DIM, seed + i).view(batch, GROUPS, room, DIM).to(dtype) for i in (8, 9)
    )
    mine = keys.clone(), values_.clone()
    places = torch.arange(batch)[:, None] * 3 % length
    mask = (values(batch * length, seed) > 0).view(batch, 1, 1, length).index_fill(3, torch.tensor([0]), True)
    z = layer(before["x"], before["cos"], before["sin"], *mine, places, length, mask if masked else None)
    q = before_cache(**before, cache=(keys, values_, places))[:, :, : HEADS * DIM]
    assert same_bits(keys, mine[0])
    assert same_bits(values_, mine[1])
    other = after_cache(
        before["x"], q.unflatten(2, (HEADS, DIM)).transpose(1, 2), keys[:, :, :length], values_[:, :, :length],
        mask[:, 0] if masked else None, **after,
    )  # fmt: skip
    assert same_bits(z, other)


def test_a_prepared_layer_refuses_what_cannot_be(use_mode: UseMode) -> None:
    before, after = arguments(1, 1, torch.float32, 8, True, True, 2)
    kinds: dict[str, Any] = {key: after[key] for key in ("scale", "out", "gate_up", "activation", "down")}
    kinds |= {"heads": HEADS, "groups": GROUPS, "second": after["norm"]}
    layer = prepare(before["norm"], before["qkv"], **kinds)
    assert layer is not None
    memory, place = torch.zeros(1, GROUPS, 4, DIM), torch.tensor([[1]])
    call = [before["x"], before["cos"], before["sin"], memory, memory.clone(), place, 2, None]
    for i, wrong, message in (
        (0, before["x"][0], "x has 2 dims"), (6, 5, "room for 5 tokens"), (6, -1, "room for -1 tokens"),
        (3, memory[:, :1], "keys"), (0, before["x"].double(), "x"), (7, torch.ones(1, 1, 1, 2), "mask"),
        (7, torch.ones(1, 1, 1, 3, dtype=torch.bool), "mask"), (7, torch.ones(1, 2, 1, 2, dtype=torch.bool), "mask"),
        (7, torch.ones(2, dtype=torch.bool), "mask"), (4, memory.to("meta"), "on meta"),
        (0, before["x"][:, :, :16], "weight has shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            layer(*call[:i], wrong, *call[i + 1 :])
    assert not memory.any()  # nothing was written
    assert layer(*call).shape == before["x"].shape
    with pytest.raises(ValueError, match="a product has 3"):
        prepare(before["norm"], before["qkv"][:2], **kinds)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a tensor"):
        prepare(before["norm"], Product([None], [], []), **kinds)  # type: ignore[list-item]
    for heads, groups in ((HEADS, 2**63 - 1), (2**62, 2**61), (HEADS, 0)):
        with pytest.raises(ValueError, match=r"heads|at least 1"):
            prepare(before["norm"], before["qkv"], **kinds | {"heads": heads, "groups": groups})(*call)  # type: ignore[misc]
    use_mode("reference")
    assert prepare(before["norm"], before["qkv"], **kinds) is None


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_keys_and_values_go_into_a_cache(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    before, _ = arguments(2, 3, torch.float32, 0, True, False, 5)
    keys, values_ = torch.zeros(2, GROUPS, 9, DIM), torch.zeros(2, GROUPS, 9, DIM)
    places = torch.tensor([[4, 0, 2], [8, 1, 3]])
    made, qkv = before_cache(**before, cache=(keys, values_, places)), before_cache(**before)
    assert same_bits(made[:, :, : HEADS * DIM], qkv[:, :, : HEADS * DIM])  # k stays as it was before it was turned
    k, v = torch.split(qkv.unflatten(2, (-1, DIM)).transpose(1, 2)[:, HEADS:], GROUPS, 1)
    for row in range(2):
        assert torch.equal(keys[row][:, places[row]], k[row])
        assert torch.equal(values_[row][:, places[row]], v[row])
    assert keys.count_nonzero() == k.count_nonzero()


@pytest.mark.parametrize("bits", [0, 8])
def test_without_kernels_it_computes_the_same(bits: int, use_mode: UseMode) -> None:
    before, after = arguments(2, 3, torch.float32, bits, True, True, 4)
    use_mode("native")
    native = run(before, after)
    use_mode("reference")
    plain = run(before, after)
    for one, other in zip(native, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.dear
@pytest.mark.parametrize("bits", [0, 4])
def test_opcheck(bits: int) -> None:
    before, after = arguments(1, 2, torch.float32, bits, True, True, 2)
    norms = before["head_norms"]
    torch.library.opcheck(
        torch.ops.zoo.decoder_before_cache.default,
        (before["x"], *before["norm"], *before["qkv"], [n.weight for n in norms], [n.eps for n in norms], False,
         before["cos"], before["sin"], *NO_CACHE, HEADS, GROUPS),
    )  # fmt: skip
    q, k = values(2 * HEADS * DIM, 0).view(1, HEADS, 2, DIM), values(4 * GROUPS * DIM, 1).view(1, GROUPS, 4, DIM)
    torch.library.opcheck(
        torch.ops.zoo.decoder_after_cache.default,
        (before["x"], q, k, k, None, 0.5, *after["out"], *after["norm"], *after["gate_up"], "relu", *after["down"]),
    )
    torch.library.opcheck(torch.ops.zoo.decoder_attention.default, (q, k, k, None, 0.5, *after["out"]))
    x = before["x"]
    torch.library.opcheck(
        torch.ops.zoo.decoder_feed_forward.default,
        (x, x.clone(), *after["norm"], *after["gate_up"], "relu", *after["down"]),
    )


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_what_cannot_be(mode: str, use_mode: UseMode) -> None:
    before, after = arguments(1, 2, torch.float32, 8, True, True, 2)
    use_mode(mode)
    with pytest.raises(ValueError, match=r"1 norms of heads|norms of heads"):
        before_cache(**before | {"head_norms": before["head_norms"][:1]})
    with pytest.raises(ValueError, match="0 heads"):
        before_cache(**before | {"heads": 0})
    with pytest.raises(ValueError, match="packed weights have"):
        before_cache(**before | {"qkv": before["qkv"]._replace(codes=[96])})
    with pytest.raises(ValueError, match="no gradient"):
        before_cache(**before | {"x": before["x"].clone().requires_grad_()})
    q = values(2 * HEADS * DIM, 0).view(1, HEADS, 2, DIM)
    with pytest.raises(ValueError, match="must be"):
        after_cache(before["x"], q, q[:, :GROUPS], q[:, :GROUPS], None, **after | {"activation": "tanh"})
    with pytest.raises(ValueError, match="packed weights have"):
        attention(q, q, q, None, scale=0.3, out=after["out"]._replace(codes=[96]))
    wrong = {key: after[key] for key in FORWARD} | {"down": after["down"]._replace(codes=[96])}
    with pytest.raises(ValueError, match="packed weights have"):
        feed_forward(before["x"], before["x"], **wrong)
    with pytest.raises(ValueError, match="no gradient"):
        feed_forward(before["x"].clone().requires_grad_(), before["x"], **wrong)
