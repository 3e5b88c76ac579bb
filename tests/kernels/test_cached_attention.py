"""Attention over a cache: the bits of the reference, the formula, and nothing but what a query sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.cases import DTYPES, same_bits, values
from tests.kernels.conftest import UseMode
from tests.kernels.oracles import THREADS, num_threads
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.cached_attention import cached_attention

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")
Tensor = torch.Tensor
HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3), (3, 3), (4, 1)])


def tensors(
    batch: int, heads: tuple[int, int], tokens: int, length: int, dim: int, dtype: torch.dtype, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q of tokens that lie beside each other, keys and values in a cache that is longer."""
    h, g = heads
    q = values(batch * tokens * h * dim, seed).view(batch, tokens, h, dim).transpose(1, 2)
    k, v = (
        values(batch * g * (length + 3) * dim, seed + i).view(batch, g, length + 3, dim)[:, :, 1 : length + 1]
        for i in (1, 2)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


@examples(times=3)
@given(
    batch=st.integers(0, 2), heads=HEADS, tokens=st.integers(0, 4), length=st.sampled_from([0, 1, 3, 4, 9, 17, 70]),
    dim=st.sampled_from([1, 3, 8, 16, 40, 64, 100]), dtype=st.sampled_from(DTYPES),
    masked=st.sampled_from([None, 0.0, 0.5, 0.9]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_instruction_set_has_the_bits_of_the_reference(
    batch: int, heads: tuple[int, int], tokens: int, length: int, dim: int, dtype: torch.dtype, masked: float | None,
    seed: int,
) -> None:  # fmt: skip
    q, k, v = tensors(batch, heads, tokens, length, dim, dtype, seed)
    mask = None
    if masked is not None:
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.rand(length, batch, tokens, generator=generator) >= masked).permute(1, 2, 0)
    found = []
    for isa in (*loading.isas(), "reference"):
        with loading.use_mode("reference") if isa == "reference" else loading.use_isa(isa):
            found.append(cached_attention(q, k, v, mask, scale=0.3))
    assert all(same_bits(one, found[-1]) for one in found)
    assert found[0].shape == (batch, tokens, heads[0] * dim)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_attention(dtype: torch.dtype, masked: bool) -> None:
    q, k, v = (t.to(dtype) / 8 for t in tensors(2, (6, 2), 4, 11, 8, torch.float32, 0))
    causal = torch.ones(4, 11, dtype=torch.bool).tril(7).expand(2, 4, 11)
    mask = causal & (torch.rand(2, 4, 11, generator=torch.Generator().manual_seed(0)) < 0.7) if masked else causal
    mask[:, :, 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=0.7, enable_gqa=True)
    y = cached_attention(q, k, v, mask if masked else None, scale=0.7)
    exact = 1e-14 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(y.view(2, 4, 6, 8).transpose(1, 2), expected, rtol=exact, atol=exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_but_what_a_query_sees_changes_it(dtype: torch.dtype) -> None:
    heads, dim, length = (6, 2), 40, 30
    q, k, v = tensors(2, heads, length, length, dim, dtype, 3)
    whole = cached_attention(q, k, v, scale=0.2)
    for threads in THREADS:
        with num_threads(threads):
            assert same_bits(cached_attention(q, k, v, scale=0.2), whole)
    for begin, end in ((0, 1), (7, 8), (7, 12), (29, 30)):  # tokens that come later, over a cache of those before
        part = cached_attention(q[:1, :, begin:end], k[:1, :, :end], v[:1, :, :end], scale=0.2)
        assert same_bits(part, whole[:1, begin:end])
    # Padding on the left, in the middle and on the right, full of what must not count.
    places = torch.cat([torch.arange(5, 20), torch.arange(24, 39)])
    room = [torch.full((2, 2, 45, dim), float("nan"), dtype=dtype) for _ in range(2)]
    for to, source in zip(room, (k, v), strict=True):
        to[:, :, places] = source
    mask = torch.zeros(2, length, 45, dtype=torch.bool)
    mask[:, :, places] = torch.ones(length, length, dtype=torch.bool).tril()
    assert same_bits(cached_attention(q, *room, mask, scale=0.2), whole)
    mask[:, 3] = False
    assert not cached_attention(q, *room, mask, scale=0.2)[:, 3].any()


@pytest.mark.parametrize("mode", ["native", "reference"])
def test_mistakes_are_value_errors(mode: str, use_mode: UseMode) -> None:
    use_mode(mode)
    q, k = torch.ones(2, 4, 3, 8), torch.ones(2, 2, 5, 8)
    how: Any = {"scale": 1.0}
    with pytest.raises(ValueError, match=r"q has 4 heads and keys have 3"):
        cached_attention(q, torch.ones(2, 3, 5, 8), torch.ones(2, 3, 5, 8), **how)
    with pytest.raises(ValueError, match=r"^keys has shape"):
        cached_attention(q, k[:1], k, **how)
    with pytest.raises(ValueError, match=r"^values has shape"):
        cached_attention(q, k, k[:, :, :4], **how)
    with pytest.raises(ValueError, match=r"^keys is"):
        cached_attention(q, k.half(), k, **how)
    with pytest.raises(ValueError, match=r"^q has shape .* must have 4 dims"):
        cached_attention(q[0], k, k, **how)
    with pytest.raises(ValueError, match=r"^mask is"):
        cached_attention(q, k, k, torch.ones(2, 3, 5), **how)
    with pytest.raises(ValueError, match=r"^mask has shape"):
        cached_attention(q, k, k, torch.ones(2, 3, 4, dtype=torch.bool), **how)
    with pytest.raises(ValueError, match=r"last dim must be contiguous"):
        cached_attention(q, torch.ones(2, 2, 8, 5).transpose(2, 3), k, **how)


def test_opcheck() -> None:
    q, k, v = tensors(2, (4, 2), 3, 9, 8, torch.float32, 0)
    for mask in (None, torch.ones(2, 3, 9, dtype=torch.bool)):
        torch.library.opcheck(torch.ops.zoo.cached_attention.default, (q, k, v, mask, 0.5))
