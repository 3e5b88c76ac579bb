"""Rotary positions and the cache: the bits of the reference, and what transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.rotary_cache import rotary_cache_

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3), (3, 3)])


@examples(times=3)
@given(
    batch=st.integers(0, 3), tokens=st.integers(0, 4), heads=HEADS,
    dims=st.sampled_from([(2, 2), (8, 8), (8, 0), (6, 2), (64, 64), (20, 14), (80, 32)]), dtype=st.sampled_from(DTYPES),
    table=st.sampled_from(DTYPES), rows=st.booleans(), cached=st.booleans(), interleaved=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_has_the_bits_of_the_reference(
    batch: int, tokens: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, table: torch.dtype,
    rows: bool, cached: bool, interleaved: bool, seed: int,
) -> None:  # fmt: skip
    (q_heads, kv_heads), (dim, rotary) = heads, dims
    qkv = (
        values(batch * tokens * (q_heads + 2 * kv_heads) * dim, seed)
        .view(batch, tokens, -1 if batch * tokens else (q_heads + 2 * kv_heads) * dim)
        .to(dtype)
    )
    angles = values((batch if rows else 1) * tokens * rotary, seed + 1).view(batch if rows else 1, tokens, rotary)
    room = tokens + 2
    cache: dict[str, Tensor] = {}
    if cached:
        generator = torch.Generator().manual_seed(seed)
        cache["keys"], cache["values"] = (
            values(batch * kv_heads * room * dim, seed + k).view(batch, kv_heads, room, dim).to(dtype) for k in (2, 3)
        )
        order = torch.stack([torch.randperm(room + 2, generator=generator)[:tokens] for _ in range(max(1, batch))])
        cache["places"] = order[: batch if rows else 1] - 1  # one before the cache, one behind it
    found = []
    for isa in (*loading.isas(), "reference"):
        copies = {name: t.clone() for name, t in {"qkv": qkv, **cache}.items()}
        where = loading.use_mode("reference") if isa == "reference" else loading.use_isa(isa)
        with where:
            rotary_cache_(
                cos=angles.cos().to(table), sin=angles.sin().to(table), q_heads=q_heads, kv_heads=kv_heads,
                interleaved=interleaved, **copies,
            )  # fmt: skip
        found.append(copies)
    for other in found[:-1]:
        assert all(same_bits(other[name], expected) for name, expected in found[-1].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_what_transformers_computes(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    batch, tokens, q_heads, kv_heads, dim = 2, 5, 4, 2, 8
    qkv = torch.randn(batch, tokens, q_heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 2)
    angles = torch.rand(batch, tokens, dim // 2, dtype=dtype) * 6
    how: Any = {"q_heads": q_heads, "kv_heads": kv_heads}
    twice = torch.cat([angles, angles], -1)
    cache = {name: torch.zeros(batch, kv_heads, 9, dim, dtype=dtype) for name in ("keys", "values")}
    places = torch.tensor([[3, 4, 5, 6, 7]])
    mine = qkv.flatten(2).clone()
    rotary_cache_(mine, twice.cos(), twice.sin(), **cache, places=places, **how)
    one, two = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), twice.cos(), twice.sin())
    torch.testing.assert_close(mine.view_as(qkv)[:, :, :q_heads], one.transpose(1, 2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cache["keys"][:, :, 3:8], two, rtol=1e-6, atol=1e-6)
    assert torch.equal(cache["values"][:, :, 3:8], v.transpose(1, 2))
    assert not cache["keys"][:, :, [0, 1, 2, 8]].any()
    assert torch.equal(mine.view_as(qkv)[:, :, q_heads:], qkv[:, :, q_heads:])
    mine = qkv.flatten(2).clone()
    pairs = angles.repeat_interleave(2, -1)
    rotary_cache_(mine, pairs.cos(), pairs.sin(), interleaved=True, **how)
    turned = gptj.apply_rotary_pos_emb(qkv[:, :, : q_heads + kv_heads], angles.sin(), angles.cos())
    torch.testing.assert_close(mine.view_as(qkv)[:, :, : q_heads + kv_heads], turned, rtol=1e-6, atol=1e-6)


def test_neither_threads_nor_other_tokens_change_a_token() -> None:
    qkv = values(3 * 200 * 15 * 64, 0).view(3, 200, -1)
    angles = values(200 * 64, 1).view(1, 200, 64)
    found = []
    for threads in THREADS:
        with num_threads(threads):
            found.append(qkv.clone())
            rotary_cache_(found[-1], angles.cos(), angles.sin(), q_heads=9, kv_heads=3)
    assert all(same_bits(one, found[0]) for one in found)
    alone = qkv[1:2, 7:9].clone()
    rotary_cache_(alone, angles[:, 7:9].cos(), angles[:, 7:9].sin(), q_heads=9, kv_heads=3)
    assert same_bits(alone, found[0][1:2, 7:9])


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    qkv, cos = torch.ones(2, 3, 32), torch.ones(1, 3, 8)
    keys, places = torch.ones(2, 1, 5, 8), torch.zeros(1, 3, dtype=torch.int64)
    how: Any = {"q_heads": 2, "kv_heads": 1}
    with pytest.raises(ValueError, match=r"qkv has shape .* whole heads of 3 q, 1 k and 1 v"):
        rotary_cache_(qkv, cos, cos, q_heads=3, kv_heads=1)
    with pytest.raises(ValueError, match=r"cos has shape \(?\[?1, 2, 8.* must begin with 1 or 2 rows of 3 tokens"):
        rotary_cache_(qkv, cos[:, :2], cos[:, :2], **how)
    with pytest.raises(ValueError, match=r"cos has shape .* its last dim must be even, and at most 8"):
        rotary_cache_(qkv, cos[..., :7].contiguous(), cos[..., :7].contiguous(), **how)
    with pytest.raises(ValueError, match=r"^sin has shape"):
        rotary_cache_(qkv, cos, cos[..., :4].contiguous(), **how)
    with pytest.raises(ValueError, match=r"keys, values and places belong together"):
        rotary_cache_(qkv, cos, cos, keys=keys, values=keys, **how)
    with pytest.raises(ValueError, match=r"^keys is|^values is"):
        rotary_cache_(qkv, cos, cos, keys=keys.half(), values=keys.half(), places=places, **how)
    with pytest.raises(ValueError, match=r"^values has shape"):
        rotary_cache_(qkv, cos, cos, keys=keys, values=keys[:, :, :4].contiguous(), places=places, **how)
    with pytest.raises(ValueError, match=r"^places is"):
        rotary_cache_(qkv, cos, cos, keys=keys, values=keys.clone(), places=places.int(), **how)


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_a_cache_without_slots_is_a_cache(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    qkv, none, c = torch.ones(1, 1, 24), torch.ones(1, 1, 0, 8), torch.full((1, 1, 8), 0.5)
    places = torch.tensor([[0]])
    rotary_cache_(qkv, c, c, q_heads=1, kv_heads=1, keys=none, values=none.clone(), places=places)
    assert bool((qkv[0, 0, 8:] == 1).all())
    for heads in ((3, 2**63 - 1), (2**62, 3 * 2**61)):
        with pytest.raises(ValueError, match="whole heads of"):
            rotary_cache_(torch.ones(1, 1, 8), c, c, q_heads=heads[0], kv_heads=heads[1])


def test_opcheck() -> None:
    qkv, cos = torch.randn(2, 3, 32), torch.randn(1, 3, 8)
    keys, places = torch.randn(2, 1, 5, 8), torch.arange(3)[None]
    op = torch.ops.zoo.rotary_cache_.default
    torch.library.opcheck(op, (qkv, cos, cos.clone(), keys, keys.clone(), places, 2, 1, False))
    torch.library.opcheck(op, (qkv, cos, cos.clone(), None, None, None, 2, 1, True))
