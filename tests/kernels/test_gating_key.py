"""A key that decides what full experts keep: as a sort of all keys decides, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.profiles import examples

from zoo.kernels import loading
from zoo.kernels.gating import positions_in_expert, reference

from .cases import DTYPES, random_indices, same_bits
from .oracles import THREADS, num_threads

pytestmark = pytest.mark.skipif(not loading.native(), reason=f"no native kernels here: {loading.why_not()}")


def by_sort(
    indices: torch.Tensor, experts: int, capacity: int | None, choices_first: bool, key: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """By a sort of all keys, which decides what is kept, and then without a key among that."""
    places = reference.positions_in_expert
    if choices_first:
        turned = places(indices.t().reshape(-1, 1), experts, capacity, False, key.t().reshape(-1, 1))
        return turned[0].view(indices.t().shape).t().contiguous(), *turned[1:]
    if capacity is None:
        return places(indices, experts, None, False)
    order = torch.sort(key.reshape(-1), descending=True, stable=True).indices
    served, counts, demand = places(indices.reshape(-1)[order].unsqueeze(1), experts, capacity, False)
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, served.squeeze(1) >= 0).view(indices.shape)
    among = places(torch.where(kept, indices, experts), experts + 1, None, False)[0]
    return torch.where(kept, among, -1), counts, demand


def keys_with_ties(shape: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return torch.ones(shape, dtype=dtype)
    if kind == "few":
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    key = torch.randn(shape, generator=generator).to(dtype)
    if kind == "special":
        tiny = torch.finfo(dtype).smallest_normal / 2
        odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, tiny, -tiny, 1.0], dtype=dtype)
        key = odd[torch.randint(0, len(odd), shape, generator=generator)]
    return key


@examples(times=6)
@given(
    tokens=st.one_of(st.sampled_from([0, 1, 65, 257]), st.integers(0, 100)),
    experts=st.one_of(st.sampled_from([1, 2, 8, 64]), st.integers(1, 130)), k=st.integers(1, 4), every=st.booleans(),
    one=st.booleans(), capacity=st.one_of(st.none(), st.integers(0, 40)), first=st.booleans(),
    dtype=st.sampled_from([*DTYPES, torch.float64]),
    kind=st.sampled_from(["equal", "few", "random", "special"]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_key_decides_as_a_sort_of_all_keys_does(
    tokens: int, experts: int, k: int, every: bool, one: bool, capacity: int | None, first: bool, dtype: torch.dtype,
    kind: str, seed: int,
) -> None:  # fmt: skip
    k = experts if every else min(k, experts)
    indices = random_indices(tokens, k, experts, seed)
    indices = torch.full_like(indices, seed % experts) if one else indices
    key = keys_with_ties((tokens, k), dtype, kind, seed)
    expected = by_sort(indices, experts, capacity, first, key)
    args = (indices, experts, capacity, first, key)
    assert all(map(same_bits, reference.positions_in_expert(*args), expected))
    if dtype is not torch.float64:
        assert all(map(same_bits, torch.ops.zoo.positions_in_expert(*args), expected))
    if not first:
        assert all(map(same_bits, positions_in_expert(indices, experts, capacity=capacity, priority=key)[:3], expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_16_bits_are_in_the_order_of_their_values(dtype: torch.dtype) -> None:
    """All 65,536 of them; each capacity asks for one more step of their order."""
    key = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 1)
    key = key[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    indices = torch.zeros(2**16, 1, dtype=torch.int64)
    for capacity in (1, 2, 2045, 2047, 31_000, 32_768, 33_000, 65_000, 65_534, 65_535):
        expected = by_sort(indices, 1, capacity, False, key)
        assert all(map(same_bits, torch.ops.zoo.positions_in_expert(indices, 1, capacity, False, key), expected))


def test_a_key_keeps_the_greatest_in_the_order_of_tokens() -> None:
    indices, key = torch.tensor([[0, 1], [0, 1], [0, 1]]), torch.tensor([[0.1, 0.5], [0.3, 0.5], [0.2, torch.nan]])
    at = positions_in_expert(indices, 3, capacity=2, priority=key.requires_grad_())
    assert at.positions.tolist() == [[-1, 0], [0, -1], [1, 1]]
    assert (at.counts.tolist(), at.demand.tolist()) == ([2, 2, 0], [3, 3, 0])
    nothing = positions_in_expert(indices, 3, capacity=0, priority=key)
    assert (nothing.positions == -1).all()
    assert positions_in_expert(indices, 3, priority=key).positions.tolist() == [[0, 0], [1, 1], [2, 2]]


def test_threads_change_no_place() -> None:
    indices = random_indices(100_003, 3, 37, 0)
    key = keys_with_ties((100_003, 3), torch.float32, "few", 0)
    expected = by_sort(indices, 37, 5000, False, key)
    for threads in THREADS:
        with num_threads(threads):
            found = positions_in_expert(indices, 37, capacity=5000, priority=key)
        assert all(map(same_bits, found[:3], expected)), threads
